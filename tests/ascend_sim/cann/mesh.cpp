#include "mesh.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace sim {

namespace {

using Clock = std::chrono::steady_clock;

sockaddr_un address(const std::string& folder, uint32_t rank) {
    sockaddr_un where{};
    where.sun_family = AF_UNIX;
    std::snprintf(where.sun_path, sizeof where.sun_path, "%s/%u", folder.c_str(), rank);
    return where;
}

bool send_all(int peer, const void* from, uint64_t size) {
    auto* place = static_cast<const char*>(from);
    while (size > 0) {
        const auto sent = send(peer, place, size, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        place += sent, size -= uint64_t(sent);
    }
    return true;
}

bool receive_all(int peer, void* to, uint64_t size) {
    auto* place = static_cast<char*>(to);
    while (size > 0) {
        const auto got = recv(peer, place, size, 0);
        if (got <= 0) return false;
        place += got, size -= uint64_t(got);
    }
    return true;
}

// Connect to a rank whose socket may not be there yet.
int connect_to(const sockaddr_un& where, Clock::time_point deadline) {
    while (Clock::now() < deadline) {
        const int peer = socket(AF_UNIX, SOCK_STREAM, 0);
        if (connect(peer, reinterpret_cast<const sockaddr*>(&where), sizeof where) == 0)
            return peer;
        close(peer);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    throw std::runtime_error(std::string("nobody listens at ") + where.sun_path);
}

int accept_from(int listener, Clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd waiting{listener, POLLIN, 0};
    if (poll(&waiting, 1, int(left.count())) != 1)
        throw std::runtime_error("a rank of the communicator did not connect");
    return accept(listener, nullptr, nullptr);
}

}  // namespace

Mesh::Mesh(const std::string& folder, uint32_t rank, uint32_t ranks, double seconds)
    : rank_(rank), peers_(ranks, -1) {
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    const auto own = address(folder, rank);
    const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0 ||
        listen(listener, int(ranks)) != 0)
        throw std::runtime_error(std::string("cannot listen at ") + own.sun_path);
    for (uint32_t lower = 0; lower < rank; ++lower) {
        peers_[lower] = connect_to(address(folder, lower), deadline);
        send_all(peers_[lower], &rank, sizeof rank);
    }
    for (uint32_t higher = rank + 1; higher < ranks; ++higher) {
        const int peer = accept_from(listener, deadline);
        uint32_t who = 0;
        if (!receive_all(peer, &who, sizeof who) || who >= ranks)
            throw std::runtime_error("a stranger connected to the communicator");
        peers_[who] = peer;
    }
    close(listener);
    unlink(own.sun_path);
    rmdir(folder.c_str());  // succeeds for the last rank that comes here
}

Mesh::~Mesh() {
    for (const int peer : peers_)
        if (peer >= 0) close(peer);
}

bool Mesh::broadcast(void* place, uint64_t size, uint32_t root, uint64_t kind) {
    std::lock_guard<std::mutex> held(lock_);
    const Header mine{++sequence_, kind, size};
    if (rank_ != root) {
        Header theirs{};
        if (!receive_all(peers_[root], &theirs, sizeof theirs)) return complain("the root is gone");
        if (!(theirs == mine)) return complain("the root is at another collective");
        return receive_all(peers_[root], place, size) || complain("the root is gone");
    }
    for (uint32_t rank = 0; rank < ranks(); ++rank)
        if (rank != root &&
            !(send_all(peers_[rank], &mine, sizeof mine) && send_all(peers_[rank], place, size)))
            return complain("a receiver is gone");
    return true;
}

bool Mesh::all_gather(const void* from, void* to, uint64_t size, uint64_t kind) {
    auto* parts = static_cast<char*>(to);
    std::memmove(parts + rank_ * size, from, size);
    for (uint32_t root = 0; root < ranks(); ++root)
        if (!broadcast(parts + root * size, size, root, kind)) return false;
    return true;
}

bool Mesh::complain(const std::string& what) const {
    std::fprintf(stderr, "simulated HCCL: rank %u of %u, collective %llu: %s\n", rank_, ranks(),
                 static_cast<unsigned long long>(sequence_), what.c_str());
    return false;
}

}  // namespace sim
