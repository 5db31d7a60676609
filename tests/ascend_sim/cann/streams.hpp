// Streams and events of the simulated NPU: a host thread per stream, one lock for all of them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

namespace sim {

// Who starts an operation only when those that come first can go no further.
enum Preference { ANY = 0, OTHERS_FIRST = 1, THIS_FIRST = 2 };

// Every stream, and the state that they wait for. Any change of it wakes everybody.
struct Machine {
    std::mutex lock;
    std::condition_variable changed;
    std::set<class Stream*> streams;
    std::set<uint64_t> closed_gates;
    uint64_t next_gate = 1;
    class Stream* chosen = nullptr;     // the stream that prefer() is about
    Preference preference = ANY;
};

Machine& machine();

// How far an event has been recorded, and how far its streams have come. A record counts up.
struct Event {
    uint64_t recorded = 0;
    uint64_t completed = 0;
    int error = 0;  // of the stream that should have completed it
    int64_t completed_ns = 0;

    bool over(uint64_t record) const { return error != 0 || completed >= record; }
};

struct Operation {
    const char* kind;              // names its delay: copy, set, op, broadcast, gather
    std::function<int()> execute;  // without the lock; an ACL error, or 0
    std::function<bool()> ready;   // asked under the lock
    std::shared_ptr<Event> event;  // completed (or failed) by this operation
    uint64_t record = 0;
};

class Stream {
public:
    Stream();
    ~Stream();  // drops what is queued

    int enqueue(const char* kind, std::function<int()> execute);
    int record(const std::shared_ptr<Event>& event);
    int wait(const std::shared_ptr<Event>& event);
    uint64_t hold();                 // a gate: what follows waits until it is opened
    int synchronize(int timeout_ms); // -1: for ever
    bool empty();
    bool quiet() const { return !running_ && !may_start(); }  // under the lock

private:
    int submit(Operation operation);
    bool may_start() const;
    bool starved() const;
    void work();
    void end(const Operation& operation, int error);

    std::deque<Operation> queue_;
    bool running_ = false;
    bool closed_ = false;
    int error_ = 0;
    std::thread thread_;
};

void prefer(Stream& stream, Preference which);
void open_gate(uint64_t gate);
bool settle(double seconds);  // wait until no stream can go on by itself
int await_event(const std::shared_ptr<Event>& event, double seconds);

}  // namespace sim
