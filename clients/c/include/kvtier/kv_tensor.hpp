// Values of the C++ interface: a status, tensors, and what a cache is configured with. Vineyard's names.
#ifndef KVTIER_KV_TENSOR_HPP
#define KVTIER_KV_TENSOR_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvtier.h"

namespace kvtier {

// What became of a call: OK, or a sentence.
class Status {
   public:
    Status() = default;
    Status(kvt_status code, std::string sentence) : code_(code), sentence_(std::move(sentence)) {}

    static Status OK() { return Status(); }
    static Status Invalid(std::string sentence) { return Status(KVT_INVALID, std::move(sentence)); }

    bool ok() const { return code_ == KVT_OK; }
    kvt_status code() const { return code_; }
    const std::string& message() const { return sentence_; }
    std::string ToString() const { return ok() ? "OK" : sentence_; }

   private:
    kvt_status code_ = KVT_OK;
    std::string sentence_;
};

// The K or the V of one token and layer.
struct KVTensor {
    void* data = nullptr;
    std::size_t length = 0;

    KVTensor() = default;
    KVTensor(void* bytes, std::size_t num_bytes) : data(bytes), length(num_bytes) {}
};
using LLMKV = KVTensor;

// K and V of one token, layer by layer.
using TokenTensors = std::vector<std::pair<LLMKV, LLMKV>>;

struct KVCacheConfig {
    int tensorByte = 10;     // bytes of a tensor
    int cacheCapacity = 10;  // tokens
    int layer = 1;
};

// A tree in the memory of a cache server. `blockSize`, `syncInterval`, `llmCacheSyncLock` and `llmRefcntObjectName` are
// accepted and do nothing: every process sees an update at once. Caches of one name, tensor size and layers share it.
struct VineyardCacheConfig : KVCacheConfig {
    int blockSize = 5;
    int syncInterval = 3;
    std::string llmCacheSyncLock;
    std::string llmCacheObjectName;
    std::string llmRefcntObjectName;
    std::string token;        // for tcp://
    double timeoutS = 1.0;    // of each call to the server

    VineyardCacheConfig(int tensor_bytes = 10, int capacity = 10, int layers = 1, int block_size = 5,
                        int sync_interval = 3, std::string sync_lock = "llmCacheSyncLock",
                        std::string object_name = "llm_cache_object", std::string refcnt_name = "llm_refcnt_object")
        : KVCacheConfig{tensor_bytes, capacity, layers},
          blockSize(block_size),
          syncInterval(sync_interval),
          llmCacheSyncLock(std::move(sync_lock)),
          llmCacheObjectName(std::move(object_name)),
          llmRefcntObjectName(std::move(refcnt_name)) {}
};

// Where chunk files lie; all kinds are used in the same way, by rename alone.
enum FilesystemType { LOCAL };

// Chunks of `chunkSize` tokens as files under `root`, in folders of `hashChunkSize` hexadecimal digits. Every
// `clientGCInterval` seconds, chunks that this cache used and that have been unused for `ttl` seconds are removed; with
// `enableGlobalGC`, so is every chunk unused for `globalTTL`, every `globalGCInterval`.
struct FileCacheConfig : KVCacheConfig {
    int chunkSize = 16;
    int hashChunkSize = 2;
    std::string root;
    FilesystemType filesystemType = LOCAL;
    int clientGCInterval = 1800;
    int ttl = 1800;
    bool enableGlobalGC = false;
    int globalGCInterval = 10800;
    int globalTTL = 10800;
    bool isShared = false;  // all who can write to the folder are trusted

    FileCacheConfig(int tensor_bytes = 10, int capacity = 10, int layers = 1, int chunk_tokens = 16,
                    int folder_digits = 2, std::string folder = "/tmp/vineyard/llm_cache", FilesystemType type = LOCAL,
                    int gc_interval_s = 1800, int ttl_s = 1800, bool collects_all = false,
                    int global_interval_s = 10800, int global_ttl_s = 10800)
        : KVCacheConfig{tensor_bytes, capacity, layers},
          chunkSize(chunk_tokens),
          hashChunkSize(folder_digits),
          root(std::move(folder)),
          filesystemType(type),
          clientGCInterval(gc_interval_s),
          ttl(ttl_s),
          enableGlobalGC(collects_all),
          globalGCInterval(global_interval_s),
          globalTTL(global_ttl_s) {}
};

namespace detail {

constexpr std::uint64_t kMaxTokenBytes = std::uint64_t{1} << 40;

inline Status CheckShape(const KVCacheConfig& config) {
    if (config.tensorByte <= 0 || config.cacheCapacity <= 0 || config.layer <= 0 || config.layer > 1 << 16) {
        return Status::Invalid("tensorByte, cacheCapacity and layer must be positive, and layer at most 65536");
    }
    if (2 * static_cast<std::uint64_t>(config.layer) * (static_cast<std::uint64_t>(config.tensorByte) + 64) >
        kMaxTokenBytes) {
        return Status::Invalid("a token has more than a tebibyte");
    }
    return Status::OK();
}

inline Status CheckTokens(const std::vector<int>& tokens) {
    for (int token : tokens) {
        if (token < 0) {
            return Status::Invalid("token ids must not be negative");
        }
    }
    return Status::OK();
}

// As many tensors as tokens, of as many layers; `mustHold` if their memory is read or filled.
inline Status CheckTensors(const std::vector<TokenTensors>& kv, std::size_t num_tokens, const KVCacheConfig& config,
                           bool mustHold) {
    if (kv.size() != num_tokens) {
        return Status::Invalid(std::to_string(num_tokens) + " tokens and the KV of " + std::to_string(kv.size()) +
                               ": there must be as many of both");
    }
    for (const TokenTensors& layers : kv) {
        if (layers.size() != static_cast<std::size_t>(config.layer)) {
            return Status::Invalid("a token has KV of " + std::to_string(layers.size()) + " layers, not " +
                                   std::to_string(config.layer));
        }
        for (const auto& pair : layers) {
            for (const KVTensor* tensor : {&pair.first, &pair.second}) {
                if (mustHold && (!tensor->data || tensor->length != static_cast<std::size_t>(config.tensorByte))) {
                    return Status::Invalid("a tensor has " + std::to_string(tensor->length) + " bytes, not " +
                                           std::to_string(config.tensorByte));
                }
            }
        }
    }
    return Status::OK();
}

inline std::vector<std::uint32_t> Ids(const std::vector<int>& prefix, const std::vector<int>& tokens) {
    std::vector<std::uint32_t> ids(prefix.begin(), prefix.end());
    ids.insert(ids.end(), tokens.begin(), tokens.end());
    return ids;
}

}  // namespace detail

// What both kinds of cache do. Any thread.
class Backend {
   public:
    Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;
    virtual ~Backend() = default;

    // Store the KV of `tokens`, which follow `prefix`; `updated` leading ones of them are cached afterwards.
    virtual Status Update(const std::vector<int>& prefix, const std::vector<int>& tokens,
                          const std::vector<TokenTensors>& kv, std::size_t& updated) = 0;

    // Find the KV of as many leading ones of `tokens`, which follow `prefix`, as are cached; none without the prefix.
    virtual Status Query(const std::vector<int>& prefix, const std::vector<int>& tokens,
                         std::vector<TokenTensors>& kv, std::size_t& matched) = 0;

    // Give back what queries have found in shared memory.
    virtual void Release() {}
};

}  // namespace kvtier

#endif
