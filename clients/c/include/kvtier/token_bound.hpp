// Keeps a tree at its capacity: when an update has brought more tokens, those used longest ago go, sequences' ends
// first. The colder half of a listing is remembered for the next times, so a listing is paid for by many updates.
#ifndef KVTIER_TOKEN_BOUND_HPP
#define KVTIER_TOKEN_BOUND_HPP

#include <cstdlib>
#include <deque>
#include <string>
#include <unordered_set>

#include "kvtier/use_times.hpp"

namespace kvtier {
namespace detail {

using Hash = std::string;  // KVT_HASH_BYTES of it

inline Hash HashAt(const std::vector<std::uint8_t>& hashes, std::size_t position) {
    return Hash(reinterpret_cast<const char*>(hashes.data()) + position * KVT_HASH_BYTES, KVT_HASH_BYTES);
}

// The number behind `"name": ` from a place of a JSON text on, or 0.
inline std::uint64_t NumberAfter(const std::string& json, const std::string& name, std::size_t from = 0) {
    std::string key = "\"" + name + "\": ";
    std::size_t at = json.find(key, from);
    return at == std::string::npos ? 0 : std::strtoull(json.c_str() + at + key.size(), nullptr, 10);
}

// The caller locks.
class TokenBound {
   public:
    TokenBound(kvt_client* client, std::string address, const std::uint8_t* tree, std::uint64_t capacity,
               std::uint64_t block_bytes, double timeout_s)
        : client_(client),
          address_(std::move(address)),
          tree_(tree, tree + KVT_NAMESPACE_BYTES),
          capacity_(capacity),
          slot_bytes_(SlotBytes(block_bytes)),
          timeout_s_(timeout_s) {}

    void Touch(const std::uint8_t* hashes, std::size_t count, std::uint64_t used_at_ns) {
        if (count && CanBeReached()) {
            Follow();
            times_.Touch(hashes, count, used_at_ns);
        }
    }

    // Prune what is too many, but nothing of the first `num_kept` hashes.
    void Enforce(const std::vector<std::uint8_t>& hashes, std::size_t num_kept) {
        if (!CanBeReached()) {
            return;
        }
        std::uint64_t num_tokens = 0, num_on_disk = 0;
        if (!Count(num_tokens, num_on_disk)) {
            num_tokens = RememberCold(0);  // among many namespaces the server does not describe this one
        }
        if (num_tokens <= capacity_) {
            return;
        }
        std::unordered_set<Hash> kept;
        for (std::size_t i = 0; i < num_kept; i++) {
            kept.insert(HashAt(hashes, i));
        }
        if (num_on_disk) {
            cold_.clear();  // tokens in memory and on disk are counted twice: only a listing shows
            num_tokens = RememberCold(static_cast<std::size_t>(capacity_));
            if (num_tokens <= capacity_) {
                return;
            }
            num_tokens += capacity_ / kSparePart;
        }
        Prune(num_tokens - capacity_, kept);
    }

   private:
    static constexpr std::uint64_t kSparePart = 16;

    bool CanBeReached() const {
        bool is_in_memory = kvt_is_local(client_) && !kvt_has_disk(client_);
        return !is_in_memory || kvt_memory_bytes(client_) > capacity_ * slot_bytes_;
    }

    // The table is looked for again when the server is another one.
    void Follow() {
        std::uint64_t memory_bytes = kvt_memory_bytes(client_);
        std::uint64_t now_ns = NowNs();
        std::uint64_t server = kvt_num_servers(client_);
        if (server != server_) {
            times_.Close();
            retry_at_ns_ = 0;
            server_ = server;
        }
        if (!memory_bytes || times_.IsOpen() || now_ns < retry_at_ns_) {
            return;
        }
        retry_at_ns_ = now_ns + std::uint64_t{5000000000};
        std::uint64_t disk_bytes = 0;
        if (kvt_has_disk(client_)) {
            disk_bytes = NumberAfter(Stats(), "disk_file_space_bytes");
        }
        std::uint64_t num_tokens = (memory_bytes + disk_bytes) / slot_bytes_;
        if (!times_.Open(address_, tree_.data(), memory_bytes, num_tokens, timeout_s_)) {
            times_.Close();
        }
    }

    std::string Stats() const {
        char* json = nullptr;
        kvt_stats(client_, &json);
        std::string text(json ? json : "");
        std::free(json);
        return text;
    }

    bool Count(std::uint64_t& num_tokens, std::uint64_t& num_on_disk) const {
        static const char digits[] = "0123456789abcdef";
        std::string shown;
        for (std::uint8_t byte : tree_) {
            shown += digits[byte >> 4];
            shown += digits[byte & 15];
        }
        std::string json = Stats();
        std::size_t at = json.find(shown);
        if (at == std::string::npos) {
            return false;
        }
        std::size_t start = json.rfind('{', at);
        num_on_disk = NumberAfter(json, "disk_blocks", start);
        num_tokens = NumberAfter(json, "blocks", start) + num_on_disk;
        return true;
    }

    void Prune(std::uint64_t excess, const std::unordered_set<Hash>& kept) {
        bool has_listed = false;
        while (excess) {
            std::vector<std::uint8_t> victims = StillCold(excess, kept);
            if (!victims.empty()) {
                std::size_t num_dropped = 0;
                std::size_t count = victims.size() / KVT_HASH_BYTES;
                if (kvt_drop(client_, victims.data(), count, &num_dropped) != KVT_OK) {
                    return;
                }
                excess -= std::min<std::uint64_t>(excess, count);
            } else if (has_listed) {
                return;
            } else {
                RememberCold(static_cast<std::size_t>(excess) + kept.size());
                has_listed = true;
            }
        }
    }

    // The next of the remembered that were not used since; empty when none are left.
    std::vector<std::uint8_t> StillCold(std::uint64_t count, const std::unordered_set<Hash>& kept) {
        std::vector<std::uint8_t> found;
        while (!cold_.empty() && found.size() < count * KVT_HASH_BYTES) {
            auto [hash, listed_at] = cold_.front();
            cold_.pop_front();
            const auto* bytes = reinterpret_cast<const std::uint8_t*>(hash.data());
            if (times_.TimeOf(bytes) <= listed_at && !kept.count(hash)) {
                found.insert(found.end(), bytes, bytes + KVT_HASH_BYTES);
            }
        }
        return found;
    }

    // The colder half of the tree, or `count` if that is more. Of unknown times the last stored go first: no end is
    // left without its beginning. Returns how many tokens there are.
    std::uint64_t RememberCold(std::size_t count) {
        std::uint8_t* hashes = nullptr;
        std::size_t num_hashes = 0;
        cold_.clear();
        if (kvt_list(client_, &hashes, &num_hashes) != KVT_OK) {
            return 0;
        }
        std::vector<std::pair<Hash, std::uint64_t>> all;
        all.reserve(num_hashes);
        for (std::size_t i = num_hashes; i-- > 0;) {
            const std::uint8_t* hash = hashes + i * KVT_HASH_BYTES;
            all.emplace_back(Hash(reinterpret_cast<const char*>(hash), KVT_HASH_BYTES), times_.TimeOf(hash));
        }
        std::free(hashes);
        std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
        all.resize(std::min(all.size(), std::max(count, all.size() / 2)));
        cold_.assign(all.begin(), all.end());
        return num_hashes;
    }

    kvt_client* client_;
    std::string address_;
    std::vector<std::uint8_t> tree_;
    std::uint64_t capacity_;
    std::uint64_t slot_bytes_;
    double timeout_s_;
    std::uint64_t retry_at_ns_ = 0;
    std::uint64_t server_ = 0;
    UseTimes times_;
    std::deque<std::pair<Hash, std::uint64_t>> cold_;
};

}  // namespace detail
}  // namespace kvtier

#endif
