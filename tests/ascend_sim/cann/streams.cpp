#include "streams.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>

#include "acl/acl.h"

namespace sim {

namespace {

// ASCEND_SIM_DELAY_US="broadcast=2000,copy=50": how long each operation of a kind takes.
int64_t fixed_delay(const std::string& kind) {
    const char* setting = std::getenv("ASCEND_SIM_DELAY_US");
    const std::string all = std::string(",") + (setting ? setting : "");
    const auto found = all.find("," + kind + "=");
    return found == std::string::npos ? 0 : std::atoll(all.c_str() + found + kind.size() + 2);
}

// ASCEND_SIM_JITTER_US=N: each operation takes up to N more. ASCEND_SIM_SEED names the sequence.
int64_t jitter() {
    const char* most = std::getenv("ASCEND_SIM_JITTER_US");
    if (most == nullptr || std::atoll(most) <= 0) return 0;
    const char* seed = std::getenv("ASCEND_SIM_SEED");
    thread_local std::mt19937_64 draw(
        (seed ? std::atoll(seed) : 0) + std::hash<std::thread::id>()(std::this_thread::get_id()));
    return std::uniform_int_distribution<int64_t>(0, std::atoll(most))(draw);
}

void take_time(const char* kind) {
    const auto duration = fixed_delay(kind) + jitter();
    if (duration > 0) std::this_thread::sleep_for(std::chrono::microseconds(duration));
}

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

template <typename Predicate>
bool await(std::unique_lock<std::mutex>& held, double seconds, Predicate predicate) {
    auto& all = machine();
    if (seconds >= 0)
        return all.changed.wait_for(held, std::chrono::duration<double>(seconds), predicate);
    all.changed.wait(held, predicate);
    return true;
}

}  // namespace

Machine& machine() {
    static auto* all = new Machine;  // outlives the streams' threads
    return *all;
}

Stream::Stream() {
    std::lock_guard<std::mutex> held(machine().lock);
    machine().streams.insert(this);
    thread_ = std::thread([this] { work(); });
}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> held(machine().lock);
        closed_ = true;
        machine().streams.erase(this);
        machine().changed.notify_all();
    }
    thread_.join();
}

int Stream::enqueue(const char* kind, std::function<int()> execute) {
    std::lock_guard<std::mutex> held(machine().lock);
    return submit({kind, std::move(execute), [] { return true; }, nullptr, 0});
}

int Stream::record(const std::shared_ptr<Event>& event) {
    std::lock_guard<std::mutex> held(machine().lock);
    const auto record = ++event->recorded;
    return submit({"record", [] { return 0; }, [] { return true; }, event, record});
}

int Stream::wait(const std::shared_ptr<Event>& event) {
    std::lock_guard<std::mutex> held(machine().lock);
    const auto record = event->recorded;  // a later record is another matter
    return submit({"wait", [event] { return event->error; },
                   [event, record] { return event->over(record); }, nullptr, 0});
}

uint64_t Stream::hold() {
    auto& all = machine();
    std::lock_guard<std::mutex> held(all.lock);
    const auto gate = all.next_gate++;
    all.closed_gates.insert(gate);
    submit({"gate", [] { return 0; }, [&all, gate] { return all.closed_gates.count(gate) == 0; },
            nullptr, 0});
    return gate;
}

int Stream::synchronize(int timeout_ms) {
    std::unique_lock<std::mutex> held(machine().lock);
    const bool ended = await(held, timeout_ms < 0 ? -1.0 : timeout_ms / 1000.0,
                             [this] { return queue_.empty() && !running_; });
    return ended ? error_ : ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
}

bool Stream::empty() {
    std::lock_guard<std::mutex> held(machine().lock);
    return queue_.empty() && !running_;
}

int Stream::submit(Operation operation) {
    if (error_ != 0) {
        if (operation.event) operation.event->error = error_;
        return error_;
    }
    queue_.push_back(std::move(operation));
    machine().changed.notify_all();
    return 0;
}

bool Stream::may_start() const {
    if (queue_.empty() || !queue_.front().ready()) return false;
    const auto& all = machine().streams;
    return !starved() || std::all_of(all.begin(), all.end(), [](const Stream* other) {
        return other->starved() || other->quiet();
    });
}

bool Stream::starved() const {
    const auto& all = machine();
    if (all.preference == ANY) return false;
    return (all.preference == OTHERS_FIRST) == (this == all.chosen);
}

void Stream::work() {
    auto& all = machine();
    std::unique_lock<std::mutex> held(all.lock);
    while (true) {
        all.changed.wait(held, [this] { return closed_ || may_start(); });
        if (closed_) return;
        const Operation operation = std::move(queue_.front());
        queue_.pop_front();
        running_ = true;
        held.unlock();
        take_time(operation.kind);
        const int error = operation.execute();
        held.lock();
        end(operation, error);
    }
}

void Stream::end(const Operation& operation, int error) {
    running_ = false;
    if (error != 0) {
        error_ = error;
        for (const auto& dropped : queue_)
            if (dropped.event) dropped.event->error = error;
        queue_.clear();
    } else if (operation.event) {
        operation.event->completed = std::max(operation.event->completed, operation.record);
        operation.event->completed_ns = now_ns();
    }
    machine().changed.notify_all();
}

void prefer(Stream& stream, Preference which) {
    auto& all = machine();
    std::lock_guard<std::mutex> held(all.lock);
    all.chosen = &stream;
    all.preference = which;
    all.changed.notify_all();
}

void open_gate(uint64_t gate) {
    std::lock_guard<std::mutex> held(machine().lock);
    machine().closed_gates.erase(gate);
    machine().changed.notify_all();
}

bool settle(double seconds) {
    auto& all = machine();
    std::unique_lock<std::mutex> held(all.lock);
    return await(held, seconds, [&all] {
        return std::all_of(all.streams.begin(), all.streams.end(),
                           [](const Stream* stream) { return stream->quiet(); });
    });
}

int await_event(const std::shared_ptr<Event>& event, double seconds) {
    std::unique_lock<std::mutex> held(machine().lock);
    const auto record = event->recorded;
    const bool over = await(held, seconds, [&] { return event->over(record); });
    return over ? event->error : ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
}

}  // namespace sim
