// The shared-memory half of KVCache: a radix tree over tokens in a cache server's memory, live for every process.
//
// Each token is a block of its own, named by a hash of itself and everything before it. A query copies nothing: the
// tensors point into the server's memory until Release() or Close(), and are not evicted meanwhile. A query that
// extends an earlier one takes its place.
#ifndef KVTIER_SHARED_CACHE_HPP
#define KVTIER_SHARED_CACHE_HPP

#include <list>
#include <mutex>

#include "kvtier/token_bound.hpp"

namespace kvtier {
namespace detail {

class SharedCache : public Backend {
   public:
    static Status Open(const std::string& socket, const VineyardCacheConfig& config,
                       std::unique_ptr<Backend>& backend) {
        Status status = CheckShape(config);
        if (!status.ok()) {
            return status;
        }
        std::unique_ptr<SharedCache> cache(new SharedCache(socket, config));
        status = cache->Connect();
        if (status.ok()) {
            backend = std::move(cache);
        }
        return status;
    }

    static Status Drop(const std::string& socket, const VineyardCacheConfig& config, std::size_t& num_dropped) {
        std::unique_ptr<Backend> backend;
        Status status = Open(socket, config, backend);
        if (!status.ok()) {
            return status;
        }
        kvt_client* client = static_cast<SharedCache*>(backend.get())->writer_.get();
        kvt_status code = kvt_drop(client, nullptr, 0, &num_dropped);
        return code == KVT_OK ? Status::OK() : Status(code, kvt_error(client));
    }

    Status Update(const std::vector<int>& prefix, const std::vector<int>& tokens,
                  const std::vector<TokenTensors>& kv, std::size_t& updated) override {
        updated = 0;
        Status status = CheckCall(prefix, tokens, kv, true);
        if (!status.ok()) {
            return status;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<std::uint8_t> hashes = HashesOf(prefix, tokens);
        std::size_t count = std::min(hashes.size() / KVT_HASH_BYTES, static_cast<std::size_t>(config_.cacheCapacity));
        if (count < std::max<std::size_t>(1, prefix.size())) {
            return Status::OK();
        }
        std::uint64_t used_at_ns = NowNs();
        std::size_t num_present = 0;
        {
            LeasePtr lease;
            status = Present(hashes.data(), count, lease, num_present);
            if (!status.ok() || num_present < prefix.size()) {
                return status;
            }
            if (num_present < count) {
                num_present += Store(hashes, num_present, count, kv, prefix.size());
            }
            bound_->Touch(hashes.data(), num_present, used_at_ns);
        }
        bound_->Enforce(hashes, num_present);
        updated = num_present - prefix.size();
        return Status::OK();
    }

    Status Query(const std::vector<int>& prefix, const std::vector<int>& tokens, std::vector<TokenTensors>& kv,
                 std::size_t& matched) override {
        matched = 0;
        Status status = CheckCall(prefix, tokens, kv, false);
        if (!status.ok()) {
            return status;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<std::uint8_t> hashes = HashesOf(prefix, tokens);
        std::uint64_t used_at_ns = NowNs();
        Hold hold;
        status = Find(hashes, hold);
        std::size_t num_found = hold.addresses.size();
        if (!status.ok() || num_found <= prefix.size()) {
            return status;
        }
        bound_->Touch(hashes.data(), num_found, used_at_ns);
        for (std::size_t i = prefix.size(); i < num_found; i++) {
            Point(kv[i - prefix.size()], hold.addresses[i]);
        }
        matched = num_found - prefix.size();
        Keep(std::move(hold));
        return Status::OK();
    }

    void Release() override {
        std::lock_guard<std::mutex> lock(mutex_);
        holds_.clear();
    }

   private:
    static constexpr std::uint64_t kTensorAlign = 64;
    static constexpr std::uint64_t kPartBytes = std::uint64_t{256} << 20;
    static constexpr std::uint64_t kPartTokens = 1 << 16;
    static constexpr std::uint64_t kPendingNs = 2000000000;

    // What one query found. Over TCP, `memory` is a copy.
    struct Hold {
        std::vector<Hash> hashes;
        std::vector<const std::uint8_t*> addresses;
        std::unique_ptr<std::uint8_t[]> memory;
        LeasePtr lease;
    };

    SharedCache(const std::string& socket, const VineyardCacheConfig& config)
        : config_(config),
          address_(socket.rfind("unix:", 0) == 0 || socket.rfind("tcp://", 0) == 0 ? socket : "unix:" + socket),
          stride_((static_cast<std::uint64_t>(config.tensorByte) + kTensorAlign - 1) / kTensorAlign * kTensorAlign),
          block_bytes_(2 * static_cast<std::uint64_t>(config.layer) * stride_) {}

    // Two clients, as what queries hold is not counted against what updates may.
    Status Connect() {
        if (config_.llmCacheObjectName.empty() ||
            kvt_tree_namespace(config_.llmCacheObjectName.c_str(), static_cast<std::uint64_t>(config_.tensorByte),
                               static_cast<std::uint64_t>(config_.layer), tree_) != KVT_OK) {
            return Status::Invalid("llmCacheObjectName must be a name in UTF-8");
        }
        Status status = ConnectOne(reader_);
        if (status.ok()) {
            status = ConnectOne(writer_);
        }
        if (status.ok()) {
            bound_ = std::make_unique<TokenBound>(writer_.get(), address_, tree_,
                                                  static_cast<std::uint64_t>(config_.cacheCapacity), block_bytes_,
                                                  config_.timeoutS);
        }
        return status;
    }

    Status ConnectOne(ClientPtr& client) {
        kvt_options options{};
        options.address = address_.c_str();
        options.namespace_id = tree_;
        options.block_bytes = block_bytes_;
        options.block_tokens = 1;
        options.name = config_.llmCacheObjectName.size() <= 256 ? config_.llmCacheObjectName.c_str() : "a tree";
        options.timeout_s = config_.timeoutS;
        if (!config_.token.empty()) {
            options.token = config_.token.data();
            options.token_bytes = config_.token.size();
        }
        kvt_client* made = nullptr;
        kvt_status code = kvt_connect(&options, &made);
        client.reset(made);
        return code == KVT_OK ? Status::OK() : Status(code, kvt_error(made));
    }

    Status CheckCall(const std::vector<int>& prefix, const std::vector<int>& tokens,
                     const std::vector<TokenTensors>& kv, bool mustHold) const {
        Status status = CheckTokens(prefix);
        if (status.ok()) {
            status = CheckTokens(tokens);
        }
        return status.ok() ? CheckTensors(kv, tokens.size(), config_, mustHold) : status;
    }

    std::vector<std::uint8_t> HashesOf(const std::vector<int>& prefix, const std::vector<int>& tokens) const {
        std::vector<std::uint32_t> ids = Ids(prefix, tokens);
        std::vector<std::uint8_t> hashes(ids.size() * KVT_HASH_BYTES);
        kvt_hash_blocks(tree_, nullptr, ids.data(), ids.size(), 1, hashes.data());
        return hashes;
    }

    Status Failed(kvt_client* client, kvt_status code) const { return Status(code, kvt_error(client)); }

    // --- reading ---

    Status Find(const std::vector<std::uint8_t>& hashes, Hold& hold) {
        std::size_t count = hashes.size() / KVT_HASH_BYTES;
        kvt_lease* lease = nullptr;
        kvt_status code = kvt_match(reader_.get(), hashes.data(), count, &lease);
        if (code != KVT_OK) {
            return Failed(reader_.get(), code);
        }
        hold.lease.reset(lease);
        std::size_t num_ready = 0;
        kvt_lease_wait(lease, kvt_lease_num_blocks(lease), &num_ready);
        if (kvt_is_local(reader_.get())) {
            std::vector<const void*> views(num_ready);
            code = kvt_lease_views(lease, 0, num_ready, views.data());
            for (std::size_t i = 0; code == KVT_OK && i < num_ready; i++) {
                hold.addresses.push_back(static_cast<const std::uint8_t*>(views[i]));
            }
        } else {
            code = Fetch(hashes, num_ready, hold);
        }
        for (std::size_t i = 0; i < hold.addresses.size(); i++) {
            hold.hashes.push_back(HashAt(hashes, i));
        }
        return code == KVT_OK ? Status::OK() : Failed(reader_.get(), code);
    }

    // A copy, in memory of this process, of what lies in that of another host.
    kvt_status Fetch(const std::vector<std::uint8_t>& hashes, std::size_t count, Hold& hold) {
        hold.memory.reset(new std::uint8_t[count * block_bytes_]);
        std::vector<void*> into(count);
        for (std::size_t i = 0; i < count; i++) {
            into[i] = hold.memory.get() + i * block_bytes_;
        }
        std::size_t num_blocks = 0;
        kvt_status code = kvt_get(reader_.get(), hashes.data(), count, into.data(), &num_blocks);
        hold.lease.reset();
        for (std::size_t i = 0; i < num_blocks; i++) {
            hold.addresses.push_back(static_cast<const std::uint8_t*>(into[i]));
        }
        return code;
    }

    void Point(TokenTensors& layers, const std::uint8_t* address) const {
        auto length = static_cast<std::size_t>(config_.tensorByte);
        for (std::size_t i = 0; i < layers.size(); i++) {
            layers[i].first = LLMKV(const_cast<std::uint8_t*>(address + 2 * i * stride_), length);
            layers[i].second = LLMKV(const_cast<std::uint8_t*>(address + (2 * i + 1) * stride_), length);
        }
    }

    // In the place of holds whose tokens it has, in the same memory.
    void Keep(Hold hold) {
        for (auto other = holds_.begin(); other != holds_.end();) {
            bool is_part = !hold.memory && other->hashes.size() <= hold.hashes.size() &&
                           other->hashes.back() == hold.hashes[other->hashes.size() - 1] &&
                           other->addresses.back() == hold.addresses[other->addresses.size() - 1];
            other = is_part ? holds_.erase(other) : std::next(other);
        }
        holds_.push_back(std::move(hold));
    }

    // --- writing ---

    // The number of cached leading tokens; they stay while the lease is held, as far as one client may lease them.
    Status Present(const std::uint8_t* hashes, std::size_t count, LeasePtr& lease, std::size_t& num_present) {
        kvt_lease* made = nullptr;
        kvt_status code = kvt_match(writer_.get(), hashes, count, &made);
        if (code != KVT_OK) {
            return Failed(writer_.get(), code);
        }
        lease.reset(made);
        kvt_lease_wait(made, kvt_lease_num_blocks(made), &num_present);
        if (num_present < count && kvt_lease_ended(made) == KVT_ENDED_LIMIT) {
            num_present += NumLeading(hashes + num_present * KVT_HASH_BYTES, count - num_present);
        }
        return Status::OK();
    }

    std::size_t NumLeading(const std::uint8_t* hashes, std::size_t count) {
        std::vector<std::uint8_t> flags(count);
        kvt_contains(writer_.get(), hashes, count, flags.data());
        return static_cast<std::size_t>(std::find(flags.begin(), flags.end(), 0) - flags.begin());
    }

    // Store tokens first .. end; returns how many leading ones are cached now. Slots stay reserved until all are
    // stored: no part of a sequence is evicted to make room for its end.
    std::size_t Store(const std::vector<std::uint8_t>& hashes, std::size_t first, std::size_t end,
                      const std::vector<TokenTensors>& kv, std::size_t num_before) {
        std::list<ReservationPtr> held;
        std::size_t at = first;
        std::uint64_t deadline = NowNs() + kPendingNs;
        std::uint64_t step = std::min(kPartTokens, std::max<std::uint64_t>(1, kPartBytes / block_bytes_));
        int look_ms = 1;
        while (at < end) {
            std::size_t count = std::min(static_cast<std::size_t>(step), end - at);
            const std::uint8_t* part = hashes.data() + at * KVT_HASH_BYTES;
            bool is_whole = false;
            kvt_status code = kvt_is_local(writer_.get()) ? Write(part, count, kv, at - num_before, held, is_whole)
                                                          : Send(part, count, kv, at - num_before, is_whole);
            if (code != KVT_OK) {
                break;
            }
            std::size_t num_leading = is_whole ? count : NumLeading(part, count);
            at += num_leading;
            if (!num_leading) {
                if (NowNs() > deadline) {
                    break;
                }
                std::this_thread::sleep_for(std::chrono::milliseconds(look_ms));  // another process is writing it
                look_ms = std::min(2 * look_ms, 50);
            }
        }
        return at - first;
    }

    kvt_status Write(const std::uint8_t* hashes, std::size_t count, const std::vector<TokenTensors>& kv,
                     std::size_t first, std::list<ReservationPtr>& held, bool& is_whole) {
        kvt_reservation* made = nullptr;
        kvt_status code = kvt_reserve(writer_.get(), hashes, count, &made);
        if (code != KVT_OK) {
            return code;
        }
        held.emplace_back(made);
        std::size_t num_slots = kvt_reservation_num_slots(made);
        for (std::size_t slot = 0; slot < num_slots; slot++) {
            auto* to = static_cast<std::uint8_t*>(kvt_reservation_slot(made, slot));
            CopyToken(to, kv[first + kvt_reservation_position(made, slot)]);
        }
        std::size_t num_committed = 0;
        if (num_slots) {
            code = kvt_commit(made, 0, num_slots, &num_committed);
        }
        is_whole = !kvt_reservation_num_pending(made) && !kvt_reservation_num_refused(made);
        return code;
    }

    kvt_status Send(const std::uint8_t* hashes, std::size_t count, const std::vector<TokenTensors>& kv,
                    std::size_t first, bool& is_whole) {
        std::vector<std::uint8_t> memory(count * block_bytes_);
        std::vector<const void*> blocks(count);
        for (std::size_t i = 0; i < count; i++) {
            CopyToken(memory.data() + i * block_bytes_, kv[first + i]);
            blocks[i] = memory.data() + i * block_bytes_;
        }
        std::size_t num_stored = 0;
        kvt_status code = kvt_set(writer_.get(), hashes, count, blocks.data(), &num_stored);
        is_whole = num_stored == count;
        return code;
    }

    void CopyToken(std::uint8_t* to, const TokenTensors& layers) const {
        auto length = static_cast<std::size_t>(config_.tensorByte);
        for (std::size_t i = 0; i < layers.size(); i++) {
            std::memcpy(to + 2 * i * stride_, layers[i].first.data, length);
            std::memcpy(to + (2 * i + 1) * stride_, layers[i].second.data, length);
        }
    }

    VineyardCacheConfig config_;
    std::string address_;
    std::uint64_t stride_;
    std::uint64_t block_bytes_;
    std::uint8_t tree_[KVT_NAMESPACE_BYTES] = {};
    std::mutex mutex_;
    ClientPtr reader_;
    ClientPtr writer_;
    std::unique_ptr<TokenBound> bound_;  // uses the writer: gone before it
    std::list<Hold> holds_;
};

}  // namespace detail
}  // namespace kvtier

#endif
