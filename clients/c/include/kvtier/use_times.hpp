// When each token of a tree was last used, by any process of this host: a table in the server's own memory, the same as
// Python's. A hint for pruning: there is no lock, and an entry written by two at once may be wrong until the next use.
#ifndef KVTIER_USE_TIMES_HPP
#define KVTIER_USE_TIMES_HPP

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "kvtier/kv_tensor.hpp"

namespace kvtier {
namespace detail {

constexpr std::uint64_t kSlotBytes = 4096;

inline std::uint64_t SlotBytes(std::uint64_t block_bytes) {
    return (block_bytes + kSlotBytes - 1) / kSlotBytes * kSlotBytes;
}

inline std::uint64_t NowNs() {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
}

struct CloseClient {
    void operator()(kvt_client* client) const { kvt_close(client); }
};
using ClientPtr = std::unique_ptr<kvt_client, CloseClient>;

struct ReleaseLease {
    void operator()(kvt_lease* lease) const { kvt_lease_release(lease); }
};
using LeasePtr = std::unique_ptr<kvt_lease, ReleaseLease>;

struct CloseReservation {
    void operator()(kvt_reservation* reservation) const { kvt_reservation_close(reservation); }
};
using ReservationPtr = std::unique_ptr<kvt_reservation, CloseReservation>;

// The table of one tree. Without it (the server is full of what is leased) nothing is noted and nothing is known.
// The caller locks.
class UseTimes {
   public:
    // `num_tokens` is how many the server's memory and disk hold: the size of the table follows from it.
    bool Open(const std::string& address, const std::uint8_t* tree, std::uint64_t memory_bytes,
              std::uint64_t num_tokens, double timeout_s) {
        std::uint64_t wanted = std::min({kMaxTableBytes, memory_bytes / kMaxPartOfMemory, 2 * kEntryBytes * num_tokens});
        num_bytes_ = kSlotBytes;
        while (num_bytes_ < wanted) {
            num_bytes_ *= 2;
        }
        std::uint8_t size[8];
        for (int i = 0; i < 8; i++) {
            size[i] = static_cast<std::uint8_t>(num_bytes_ >> 8 * i);
        }
        const kvt_run runs[] = {{"times of last use", 17}, {size, 8}, {tree, KVT_NAMESPACE_BYTES}};
        kvt_digest(runs, 3, hash_);
        kvt_options options{};
        options.address = address.c_str();
        options.namespace_id = hash_;
        options.block_bytes = num_bytes_;
        options.block_tokens = 1;
        options.name = "times of use";
        options.timeout_s = timeout_s;
        kvt_client* client = nullptr;
        kvt_status status = kvt_connect(&options, &client);
        client_.reset(client);
        return status == KVT_OK && Lease();
    }

    bool IsOpen() const { return entries_ != nullptr; }

    void Close() {
        entries_ = nullptr;
        lease_.reset();
        client_.reset();
    }

    // Tokens that follow each other were used at that time; the last of them counts as used first.
    void Touch(const std::uint8_t* hashes, std::size_t count, std::uint64_t used_at_ns) {
        for (std::size_t i = 0; entries_ && i < count; i++) {
            std::uint64_t name = Name(hashes + i * KVT_HASH_BYTES);
            std::size_t place = PlaceFor(name);
            Store(place, name);
            Store(place + 1, used_at_ns - i);
        }
    }

    // 0 is unknown.
    std::uint64_t TimeOf(const std::uint8_t* hash) const {
        if (!entries_) {
            return 0;
        }
        std::uint64_t name = Name(hash);
        std::size_t place = PlaceFor(name);
        return Load(place) == name ? Load(place + 1) : 0;
    }

   private:
    static constexpr std::uint64_t kEntryBytes = 16;
    static constexpr std::uint64_t kMaxTableBytes = std::uint64_t{128} << 20;
    static constexpr std::uint64_t kMaxPartOfMemory = 16;
    static constexpr int kPlaces = 8;
    static constexpr int kTries = 1000;

    bool Lease() {
        for (int attempt = 0; attempt < kTries; attempt++) {
            kvt_lease* lease = nullptr;
            if (kvt_match(client_.get(), hash_, 1, &lease) != KVT_OK) {
                return false;
            }
            lease_.reset(lease);
            const void* view = nullptr;
            if (kvt_lease_num_blocks(lease) && kvt_lease_views(lease, 0, 1, &view) == KVT_OK) {
                entries_ = static_cast<volatile std::uint64_t*>(const_cast<void*>(view));
                return true;
            }
            lease_.reset();
            if (!Make()) {
                return false;
            }
        }
        return false;
    }

    // All zeros, unless another process is about to. False if there is no room.
    bool Make() {
        kvt_reservation* made = nullptr;
        if (kvt_reserve(client_.get(), hash_, 1, &made) != KVT_OK) {
            return false;
        }
        ReservationPtr reservation(made);
        if (kvt_reservation_num_slots(made)) {
            std::memset(kvt_reservation_slot(made, 0), 0, num_bytes_);
            std::size_t num_committed = 0;
            return kvt_commit(made, 0, 1, &num_committed) == KVT_OK;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return true;
    }

    static std::uint64_t Name(const std::uint8_t* hash) {
        std::uint64_t name = 0;
        for (int i = 7; i >= 0; i--) {
            name = name << 8 | hash[i];
        }
        return name;
    }

    std::uint64_t Load(std::size_t place) const { return entries_[place]; }
    void Store(std::size_t place, std::uint64_t number) { entries_[place] = number; }

    // Where a name is, or where it goes: an empty place, or that of the entry used longest ago.
    std::size_t PlaceFor(std::uint64_t name) const {
        std::uint64_t mask = num_bytes_ / kEntryBytes - 1;
        std::uint64_t stride = name >> 32 | 1;
        std::size_t coldest = 0;
        std::uint64_t coldest_time = UINT64_MAX;
        for (std::uint64_t step = 0; step < kPlaces; step++) {
            std::size_t place = static_cast<std::size_t>(2 * ((name + step * stride) & mask));
            if (Load(place) == name) {
                return place;
            }
            if (Load(place + 1) < coldest_time) {
                coldest = place;
                coldest_time = Load(place + 1);
            }
        }
        return coldest;
    }

    ClientPtr client_;
    LeasePtr lease_;
    volatile std::uint64_t* entries_ = nullptr;
    std::uint64_t num_bytes_ = 0;
    std::uint8_t hash_[KVT_HASH_BYTES] = {};
};

}  // namespace detail
}  // namespace kvtier

#endif
