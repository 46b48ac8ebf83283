// Vineyard's names for programs that were written to its LLM KV cache: include this in place of llm-cache/ds/config.h,
// llm-cache/ds/kv_cache_manager.h or kv_state_cache_manager.h, and common/util/logging.h.
#ifndef KVTIER_VINEYARD_HPP
#define KVTIER_VINEYARD_HPP

#include <iostream>
#include <sstream>
#include <stdexcept>

#include "kvtier.hpp"
#include "kvtier/global_collection.hpp"

namespace vineyard {

using kvtier::FileCacheConfig;
using kvtier::FilesystemType;
using kvtier::KVCache;
using kvtier::KVCacheConfig;
using kvtier::KVTensor;
using kvtier::LLMKV;
using kvtier::LOCAL;
using kvtier::Status;
using kvtier::TokenTensors;
using kvtier::VineyardCacheConfig;

// What a cache server says of itself, in bytes.
struct InstanceStatus {
    std::size_t memory_usage = 0;
    std::size_t memory_limit = 0;
};

// There are no objects beside blocks; listings of them are empty.
struct ObjectMeta {
    std::string ToString() const { return ""; }
};

// A cache server by its socket.
class Client {
   public:
    // Fails unless a server answers.
    Status Connect(const std::string& socket) {
        socket_ = socket;
        struct InstanceStatus status;
        return Ask(status);
    }

    void Disconnect() {}
    const std::string& IPCSocket() const { return socket_; }
    std::uint64_t instance_id() const { return 0; }
    std::vector<ObjectMeta> ListObjectMeta(const std::string&, bool = false) { return {}; }

    Status InstanceStatus(std::shared_ptr<struct InstanceStatus>& status) {
        status = std::make_shared<struct InstanceStatus>();
        return Ask(*status);
    }

   private:
    Status Ask(struct InstanceStatus& found) const {
        bool is_address = socket_.rfind("unix:", 0) == 0 || socket_.rfind("tcp://", 0) == 0;
        std::string address = is_address ? socket_ : "unix:" + socket_;
        const std::uint8_t nothing[KVT_NAMESPACE_BYTES] = {};
        kvt_options options{};
        options.address = address.c_str();
        options.namespace_id = nothing;
        options.block_bytes = 1;
        options.block_tokens = 1;
        options.name = "vineyard client";
        kvt_client* made = nullptr;
        kvt_status code = kvt_connect(&options, &made);
        kvtier::detail::ClientPtr client(made);
        char* json = nullptr;
        if (code == KVT_OK) {
            code = kvt_stats(made, &json);
        }
        if (code != KVT_OK) {
            return Status(code, kvt_error(made));
        }
        std::string text(json);
        std::free(json);
        found.memory_usage = kvtier::detail::NumberAfter(text, "used_bytes");
        found.memory_limit = kvtier::detail::NumberAfter(text, "memory_bytes");
        return Status::OK();
    }

    std::string socket_;
};

// A KVCache under Vineyard's name. Config() is what it was made with.
class KVCacheManager {
   public:
    static Status Make(Client& client, std::shared_ptr<KVCacheManager>& manager, VineyardCacheConfig& config) {
        auto made = std::make_shared<KVCacheManager>();
        made->config_ = std::make_shared<VineyardCacheConfig>(config);
        Status status = KVCache::Make(client.IPCSocket(), config, made->cache_);
        if (status.ok()) {
            Remember(config);
            manager = made;
        }
        return status;
    }

    static Status Make(std::shared_ptr<KVCacheManager>& manager, FileCacheConfig& config) {
        auto made = std::make_shared<KVCacheManager>();
        made->config_ = std::make_shared<FileCacheConfig>(config);
        made->files_ = std::make_unique<FileCacheConfig>(config);
        Status status = KVCache::Make(config, made->cache_);
        if (status.ok()) {
            made->StartGlobalGCThread();
            manager = made;
        }
        return status;
    }

    template <typename... Arguments>
    Status Update(Arguments&&... arguments) {
        return cache_->Update(std::forward<Arguments>(arguments)...);
    }

    template <typename... Arguments>
    Status Query(Arguments&&... arguments) {
        return cache_->Query(std::forward<Arguments>(arguments)...);
    }

    void Close() { cache_->Close(); }

    // With enableGlobalGC, what is old goes until the process ends, also after Close().
    void StopGlobalGCThread() { kvtier::detail::GlobalCollection::OfProcess().Stop(); }
    void StartGlobalGCThread() {
        if (files_ && files_->enableGlobalGC) {
            kvtier::detail::GlobalCollection::OfProcess().Add(*files_);
        }
    }

    std::shared_ptr<KVCacheConfig> Config() { return config_; }

    static Status ClearGlobalCache(Client& client, VineyardCacheConfig& config) {
        std::size_t num_dropped = 0;
        return KVCache::Drop(client.IPCSocket(), config, num_dropped);
    }

    // Every tree of that name that this process has opened.
    static Status ClearNamed(Client& client, const std::string& object_name) {
        for (VineyardCacheConfig& config : Opened()) {
            if (config.llmCacheObjectName == object_name) {
                Status status = ClearGlobalCache(client, config);
                if (!status.ok()) {
                    return status;
                }
            }
        }
        return Status::OK();
    }

   private:
    static std::vector<VineyardCacheConfig> Opened() {
        std::lock_guard<std::mutex> lock(Mutex());
        return Configs();
    }

    static void Remember(const VineyardCacheConfig& config) {
        std::lock_guard<std::mutex> lock(Mutex());
        for (const VineyardCacheConfig& known : Configs()) {
            if (known.llmCacheObjectName == config.llmCacheObjectName && known.tensorByte == config.tensorByte &&
                known.layer == config.layer) {
                return;
            }
        }
        Configs().push_back(config);
    }

    static std::mutex& Mutex() {
        static std::mutex mutex;
        return mutex;
    }

    static std::vector<VineyardCacheConfig>& Configs() {
        static std::vector<VineyardCacheConfig> configs;
        return configs;
    }

    std::shared_ptr<KVCacheConfig> config_;
    std::unique_ptr<FileCacheConfig> files_;  // if the cache is one of files
    std::shared_ptr<KVCache> cache_;
};

using KVStateCacheManager = KVCacheManager;

struct BlobStorage {
    static Status ClearGlobalCache(Client& client, const std::string&, const std::string& object_name,
                                   const std::string&) {
        return KVCacheManager::ClearNamed(client, object_name);
    }
};

namespace detail {

// A line to standard error, when it is complete.
class LogLine {
   public:
    explicit LogLine(bool is_shown) : is_shown_(is_shown) {}
    LogLine(const LogLine&) = delete;
    LogLine& operator=(const LogLine&) = delete;
    ~LogLine() {
        if (is_shown_) {
            std::cerr << text_.str() + "\n";
        }
    }
    template <typename Value>
    LogLine& operator<<(const Value& value) {
        text_ << value;
        return *this;
    }

   private:
    bool is_shown_;
    std::ostringstream text_;
};

inline void Require(bool is_so, const std::string& what) {
    if (!is_so) {
        throw std::runtime_error(what);
    }
}

inline void Assert(const char* condition, bool is_so, const std::string& why = "") {
    Require(is_so, std::string("not so: ") + condition + " " + why);
}

}  // namespace detail
}  // namespace vineyard

#ifndef LOG
#define LOG(severity) ::vineyard::detail::LogLine(true)
#endif
#ifndef VLOG
#define VLOG(level) ::vineyard::detail::LogLine(false)
#endif
#ifndef VINEYARD_CHECK_OK
#define VINEYARD_CHECK_OK(expression)                                   \
    do {                                                                \
        auto kvtier_status = (expression);                              \
        ::vineyard::detail::Require(kvtier_status.ok(), kvtier_status.ToString()); \
    } while (0)
#endif
#ifndef VINEYARD_ASSERT
#define VINEYARD_ASSERT(...) ::vineyard::detail::Assert(#__VA_ARGS__, __VA_ARGS__)
#endif

#endif
