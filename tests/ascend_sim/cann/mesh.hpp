// Ranks of one communicator, each connected with each by a Unix socket.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// What a rank says before the bytes of a collective: all ranks must be at the same one.
struct Header {
    uint64_t sequence;
    uint64_t kind;
    uint64_t bytes;
    bool operator==(const Header& other) const {
        return sequence == other.sequence && kind == other.kind && bytes == other.bytes;
    }
};

class Mesh {
public:
    // Blocks until every rank is there, or `seconds` are over (std::runtime_error then).
    Mesh(const std::string& folder, uint32_t rank, uint32_t ranks, double seconds);
    ~Mesh();

    // `size` bytes at `place` go from rank `root` to all. A lost rank or another collective than
    // the root's is told on stderr, and false.
    bool broadcast(void* place, uint64_t size, uint32_t root, uint64_t kind);
    // Every rank's `size` bytes in rank order at `to`.
    bool all_gather(const void* from, void* to, uint64_t size, uint64_t kind);

    uint32_t rank() const { return rank_; }
    uint32_t ranks() const { return uint32_t(peers_.size()); }

private:
    bool complain(const std::string& what) const;

    std::mutex lock_;  // one collective at a time
    uint32_t rank_;
    uint64_t sequence_ = 0;
    std::vector<int> peers_;
};

}  // namespace sim
