// KVCache: Vineyard's class on kvtier, for engines that hold their own KV tensors. Needs C++17 and
// libkvtier. docs/c.md is the manual; kvtier/vineyard.hpp has Vineyard's own names for programs written for them.
#ifndef KVTIER_HPP
#define KVTIER_HPP

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "kvtier/file_cache.hpp"
#include "kvtier/shared_cache.hpp"

namespace kvtier {

// The KV of token sequences, in the shared memory of a cache server or in files of a folder. Any thread.
//
// An invalid call, or one without an answer from the server, returns a status that is not ok; a miss is ok with a
// smaller count than was asked for, except for the calls about one token, which are not ok then.
class KVCache {
   public:
    using LayerMap = std::map<int, std::pair<LLMKV, LLMKV>>;

    // `socket` is the path of a cache server's socket, unix:/path, or tcp://host:port with config.token.
    static Status Make(const std::string& socket, const VineyardCacheConfig& config,
                       std::shared_ptr<KVCache>& cache) {
        std::unique_ptr<Backend> backend;
        Status status = detail::SharedCache::Open(socket, config, backend);
        return Finish(status, std::move(backend), config, cache);
    }

    static Status Make(const FileCacheConfig& config, std::shared_ptr<KVCache>& cache) {
        std::unique_ptr<Backend> backend;
        Status status = detail::FileCache::Open(config, backend);
        return Finish(status, std::move(backend), config, cache);
    }

    // Forget every token of a tree; `num_dropped` were there.
    static Status Drop(const std::string& socket, const VineyardCacheConfig& config, std::size_t& num_dropped) {
        return detail::SharedCache::Drop(socket, config, num_dropped);
    }

    // Store the KV of `tokens`, which follow `prefix`; `updated` leading ones of them are cached afterwards, those that
    // were cached before included; none if the prefix is not. With files, whole chunks count.
    Status Update(const std::vector<int>& prefix, const std::vector<int>& tokens,
                  const std::vector<TokenTensors>& kv, std::size_t& updated) {
        updated = 0;
        std::shared_lock<std::shared_mutex> lock(mutex_);
        return backend_ ? backend_->Update(prefix, tokens, kv, updated) : Closed();
    }

    Status Update(const std::vector<int>& tokens, const std::vector<TokenTensors>& kv, std::size_t& updated) {
        return Update({}, tokens, kv, updated);
    }

    Status Update(const std::vector<int>& prefix, int next_token, const TokenTensors& kv) {
        std::size_t updated = 0;
        Status status = Update(prefix, {next_token}, {kv}, updated);
        return status.ok() && updated == 0 ? Status(KVT_FULL, "the token was not stored: no room, or no prefix")
                                           : status;
    }

    Status Update(const std::vector<int>& prefix, int next_token, const LayerMap& kv) {
        TokenTensors tensors;
        for (const auto& [layer, pair] : kv) {
            tensors.push_back(pair);
        }
        return Update(prefix, next_token, tensors);
    }

    // Find the KV of as many leading tokens as are cached. With files the caller's tensors are filled; with shared
    // memory they are pointed into it, to be read until Release() or Close().
    Status Query(const std::vector<int>& prefix, const std::vector<int>& tokens, std::vector<TokenTensors>& kv,
                 std::size_t& matched) {
        matched = 0;
        std::shared_lock<std::shared_mutex> lock(mutex_);
        return backend_ ? backend_->Query(prefix, tokens, kv, matched) : Closed();
    }

    Status Query(const std::vector<int>& tokens, std::vector<TokenTensors>& kv, std::size_t& matched) {
        return Query({}, tokens, kv, matched);
    }

    Status Query(const std::vector<int>& prefix, int next_token, TokenTensors& kv) {
        std::vector<TokenTensors> all = {kv};
        std::size_t matched = 0;
        Status status = Query(prefix, {next_token}, all, matched);
        if (status.ok() && matched == 1) {
            kv = all[0];
        }
        return status.ok() && matched == 0 ? Status(KVT_UNAVAILABLE, "the token is not cached") : status;
    }

    Status Query(const std::vector<int>& prefix, int next_token, LayerMap& kv) {
        TokenTensors tensors(static_cast<std::size_t>(config_.layer));
        Status status = Query(prefix, next_token, tensors);
        if (status.ok()) {
            kv.clear();
            for (std::size_t layer = 0; layer < tensors.size(); layer++) {
                kv[static_cast<int>(layer)] = tensors[layer];
            }
        }
        return status;
    }

    // Give back what queries have found in shared memory: tensors point at nothing from now on.
    void Release() {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        if (backend_) {
            backend_->Release();
        }
    }

    // Wait for calls under way and give everything back; what is cached stays. May be called again.
    void Close() {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        backend_.reset();
    }

    const KVCacheConfig& Config() const { return config_; }

   private:
    KVCache(std::unique_ptr<Backend> backend, const KVCacheConfig& config)
        : backend_(std::move(backend)), config_(config) {}

    static Status Finish(const Status& status, std::unique_ptr<Backend> backend, const KVCacheConfig& config,
                         std::shared_ptr<KVCache>& cache) {
        if (status.ok()) {
            cache.reset(new KVCache(std::move(backend), config));
        }
        return status;
    }

    static Status Closed() { return Status(KVT_UNAVAILABLE, "this cache is closed"); }

    std::shared_mutex mutex_;
    std::unique_ptr<Backend> backend_;
    KVCacheConfig config_;
};

}  // namespace kvtier

#endif
