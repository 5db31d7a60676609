// CANN's operator compiler (libacl_op_compiler.so): options are taken and forgotten.
#include <cstring>

#include "acl/acl_op_compiler.h"

extern "C" {
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 1; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
    std::memset(value, 0, length);
    return ACL_SUCCESS;
}
aclError aclopSetCompileFlag(aclOpCompileFlag) { return ACL_SUCCESS; }
}
