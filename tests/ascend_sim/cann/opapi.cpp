// The few tensor operations that KVPP runs on a device, under CANN's operator interface
// (libopapi.so): fill, copy, and rows gathered and scattered by index. An operation has two calls:
// the first makes an executor, the second puts it on a stream.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "acl/acl.h"

extern "C" int sim_enqueue(aclrtStream stream, const char* kind, std::function<int()>* execute);

namespace {

constexpr int UNSUPPORTED = ACL_ERROR_FEATURE_UNSUPPORTED;

int64_t size_of(aclDataType type) {
    static const std::map<aclDataType, int64_t> sizes = {
        {ACL_INT8, 1},  {ACL_UINT8, 1},   {ACL_BOOL, 1}, {ACL_FLOAT8_E4M3FN, 1}, {ACL_INT16, 2},
        {ACL_UINT16, 2}, {ACL_FLOAT16, 2}, {ACL_BF16, 2}, {ACL_INT32, 4},        {ACL_UINT32, 4},
        {ACL_FLOAT, 4}, {ACL_INT64, 8},   {ACL_UINT64, 8}, {ACL_DOUBLE, 8}};
    return sizes.at(type);
}

}  // namespace

struct aclScalar {
    aclDataType type;
    char bytes[8];
};

struct aclOpExecutor {
    std::function<int()> execute;
};

// A strided view of memory, in elements.
struct aclTensor {
    std::vector<int64_t> dims, strides;
    aclDataType type;
    char* data;

    aclTensor at(int64_t dim, int64_t index) const {
        aclTensor part = *this;
        part.data += index * strides[dim] * size_of(type);
        part.dims.erase(part.dims.begin() + dim);
        part.strides.erase(part.strides.begin() + dim);
        return part;
    }
    bool contiguous() const {
        int64_t expected = 1;
        for (size_t dim = dims.size(); dim-- > 0; expected *= dims[dim])
            if (dims[dim] != 1 && strides[dim] != expected) return false;
        return true;
    }
    int64_t elements() const {
        int64_t count = 1;
        for (const auto dim : dims) count *= dim;
        return count;
    }
};

namespace {

int copy(const aclTensor& to, const aclTensor& from) {
    if (to.type != from.type || to.dims != from.dims) return UNSUPPORTED;
    if (to.dims.empty() || (to.contiguous() && from.contiguous())) {
        std::memmove(to.data, from.data, size_t(to.elements() * size_of(to.type)));
        return 0;
    }
    for (int64_t index = 0; index < to.dims[0]; ++index)
        if (const int error = copy(to.at(0, index), from.at(0, index))) return error;
    return 0;
}

// `element` holds one element of the tensor's type.
void fill(const aclTensor& to, const char* element) {
    if (to.dims.empty()) {
        std::memcpy(to.data, element, size_t(size_of(to.type)));
        return;
    }
    if (to.contiguous()) {
        const auto size = size_of(to.type);
        for (int64_t index = 0; index < to.elements(); ++index)
            std::memcpy(to.data + index * size, element, size_t(size));
        return;
    }
    for (int64_t index = 0; index < to.dims[0]; ++index) fill(to.at(0, index), element);
}

// The integer `value` as an element of `type`.
bool encode(int64_t value, aclDataType type, char* element) {
    const auto real = float(value);
    if (type == ACL_FLOAT) {
        std::memcpy(element, &real, sizeof real);
        return true;
    }
    const bool integer = type == ACL_INT8 || type == ACL_UINT8 || type == ACL_INT16 ||
                         type == ACL_INT32 || type == ACL_INT64;
    std::memcpy(element, &value, 8);  // little endian: the first bytes are the short form
    return integer || value == 0;
}

bool decode(const aclScalar& scalar, int64_t* value) {
    double real;
    float single;
    switch (scalar.type) {
        case ACL_INT64: std::memcpy(value, scalar.bytes, 8); return true;
        case ACL_DOUBLE: std::memcpy(&real, scalar.bytes, 8); break;
        case ACL_FLOAT: std::memcpy(&single, scalar.bytes, 4); real = single; break;
        default: return false;
    }
    *value = int64_t(real);
    return double(*value) == real;
}

int prepare(uint64_t* workspace, aclOpExecutor** executor, std::function<int()> execute) {
    *workspace = 0;
    *executor = new aclOpExecutor{std::move(execute)};
    return 0;
}

int launch(aclOpExecutor* executor, aclrtStream stream) {
    const int error = sim_enqueue(stream, "op", &executor->execute);
    delete executor;
    return error;
}

int64_t id(const aclTensor& index, int64_t place) {
    const auto entry = index.at(0, place);
    int64_t value = 0;
    if (index.type == ACL_INT64) std::memcpy(&value, entry.data, 8);
    if (index.type == ACL_INT32) value = *reinterpret_cast<const int32_t*>(entry.data);
    return value;
}

}  // namespace

#define LAUNCH(name) \
    int name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) { \
        return launch(executor, stream); \
    }

extern "C" {

aclTensor* aclCreateTensor(const int64_t* dims, uint64_t count, aclDataType type,
                           const int64_t* strides, int64_t offset, aclFormat, const int64_t*,
                           uint64_t, void* data) {
    return new aclTensor{{dims, dims + count}, {strides, strides + count}, type,
                         static_cast<char*>(data) + offset * size_of(type)};
}
int aclDestroyTensor(const aclTensor* tensor) {
    delete tensor;
    return 0;
}
aclScalar* aclCreateScalar(void* value, aclDataType type) {
    auto* scalar = new aclScalar{type, {}};
    std::memcpy(scalar->bytes, value, size_t(size_of(type)));
    return scalar;
}
int aclDestroyScalar(const aclScalar* scalar) {
    delete scalar;
    return 0;
}

int aclnnInplaceCopyGetWorkspaceSize(aclTensor* to, const aclTensor* from, uint64_t* workspace,
                                     aclOpExecutor** executor) {
    return prepare(workspace, executor, [to = *to, from = *from] { return copy(to, from); });
}
LAUNCH(aclnnInplaceCopy)

int aclnnInplaceFillScalarGetWorkspaceSize(aclTensor* to, const aclScalar* scalar,
                                           uint64_t* workspace, aclOpExecutor** executor) {
    int64_t value;
    std::vector<char> element(8);
    if (!decode(*scalar, &value) || !encode(value, to->type, element.data())) return UNSUPPORTED;
    return prepare(workspace, executor, [to = *to, element] {
        fill(to, element.data());
        return 0;
    });
}
LAUNCH(aclnnInplaceFillScalar)

int aclnnInplaceZeroGetWorkspaceSize(aclTensor* to, uint64_t* workspace, aclOpExecutor** executor) {
    return prepare(workspace, executor, [to = *to] {
        fill(to, std::vector<char>(8, 0).data());
        return 0;
    });
}
LAUNCH(aclnnInplaceZero)

int aclnnIndexSelectGetWorkspaceSize(const aclTensor* from, int64_t dim, const aclTensor* index,
                                     aclTensor* to, uint64_t* workspace,
                                     aclOpExecutor** executor) {
    return prepare(workspace, executor, [from = *from, dim, index = *index, to = *to] {
        int error = 0;
        for (int64_t place = 0; place < index.elements() && error == 0; ++place)
            error = copy(to.at(dim, place), from.at(dim, id(index, place)));
        return error;
    });
}
LAUNCH(aclnnIndexSelect)

int aclnnInplaceIndexCopyGetWorkspaceSize(aclTensor* to, int64_t dim, const aclTensor* index,
                                          const aclTensor* from, uint64_t* workspace,
                                          aclOpExecutor** executor) {
    return prepare(workspace, executor, [to = *to, dim, index = *index, from = *from] {
        int error = 0;
        for (int64_t place = 0; place < index.elements() && error == 0; ++place)
            error = copy(to.at(dim, id(index, place)), from.at(dim, place));
        return error;
    });
}
LAUNCH(aclnnInplaceIndexCopy)
}
