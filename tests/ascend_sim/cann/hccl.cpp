// Collectives of the simulated NPU under HCCL's interface (libhccl.so): a communicator is a mesh of
// Unix sockets, a collective is an operation of a stream. Only what KVPP uses is here.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>

#include "mesh.hpp"
#include "third_party/hccl/inc/hccl/hccl.h"

extern "C" int sim_enqueue(aclrtStream stream, const char* kind, std::function<int()>* execute);

namespace {

constexpr double CONNECT_SECONDS = 60;
enum Kind : uint64_t { BROADCAST = 1, ALL_GATHER = 2 };

using Communicator = std::shared_ptr<sim::Mesh>;  // an operation under way keeps it

const Communicator& mesh_of(HcclComm comm) { return *static_cast<Communicator*>(comm); }

uint64_t size_of(HcclDataType type) {
    static const std::map<HcclDataType, uint64_t> sizes = {
        {HCCL_DATA_TYPE_INT8, 1},   {HCCL_DATA_TYPE_UINT8, 1},  {HCCL_DATA_TYPE_INT16, 2},
        {HCCL_DATA_TYPE_UINT16, 2}, {HCCL_DATA_TYPE_FP16, 2},   {HCCL_DATA_TYPE_BFP16, 2},
        {HCCL_DATA_TYPE_INT32, 4},  {HCCL_DATA_TYPE_UINT32, 4}, {HCCL_DATA_TYPE_FP32, 4},
        {HCCL_DATA_TYPE_INT64, 8},  {HCCL_DATA_TYPE_UINT64, 8}, {HCCL_DATA_TYPE_FP64, 8},
        {HCCL_DATA_TYPE_FP8E4M3, 1}};
    return sizes.at(type);
}

HcclResult enqueue(aclrtStream stream, const char* kind, std::function<bool()> collective) {
    std::function<int()> execute = [collective] {
        return collective() ? ACL_SUCCESS : int(ACL_ERROR_RT_INTERNAL_ERROR);
    };
    return sim_enqueue(stream, kind, &execute) == 0 ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
    std::memset(info, 0, sizeof *info);
    const char* temporary = std::getenv("TMPDIR");
    std::snprintf(info->internal, sizeof info->internal, "%s/ascend-sim-XXXXXX",
                  temporary != nullptr ? temporary : "/tmp");
    return mkdtemp(info->internal) != nullptr ? HCCL_SUCCESS : HCCL_E_SYSCALL;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                HcclComm* comm) {
    try {
        *comm = new Communicator(
            std::make_shared<sim::Mesh>(info->internal, rank, ranks, CONNECT_SECONDS));
    } catch (const std::runtime_error& error) {
        std::fprintf(stderr, "simulated HCCL: rank %u of %u: %s\n", rank, ranks, error.what());
        return HCCL_E_TIMEOUT;
    }
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                      const HcclCommConfig*, HcclComm* comm) {
    return HcclCommInitRootInfo(ranks, info, rank, comm);
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }

HcclResult HcclCommDestroy(HcclComm comm) {
    delete static_cast<Communicator*>(comm);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
    std::snprintf(name, COMM_NAME_MAX_LENGTH, "simulated-%p", comm);
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) {
    *ranks = mesh_of(comm)->ranks();
    return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    *rank = mesh_of(comm)->rank();
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult) { return "simulated HCCL failed"; }

HcclResult HcclBroadcast(void* place, uint64_t count, HcclDataType type, uint32_t root,
                         HcclComm comm, aclrtStream stream) {
    return enqueue(stream, "broadcast", [=, mesh = mesh_of(comm), size = count * size_of(type)] {
        return mesh->broadcast(place, size, root, BROADCAST);
    });
}

HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm comm,
                         aclrtStream stream) {
    return enqueue(stream, "gather", [=, mesh = mesh_of(comm), size = count * size_of(type)] {
        return mesh->all_gather(from, to, size, ALL_GATHER);
    });
}
}
