// The file half of KVCache: chunks of tokens as files that any number of processes and hosts share, Python's too.
#ifndef KVTIER_FILE_CACHE_HPP
#define KVTIER_FILE_CACHE_HPP

#include <condition_variable>
#include <memory>
#include <mutex>

#include "kvtier/chunk_room.hpp"

namespace kvtier {
namespace detail {

class FileCache : public Backend {
   public:
    static Status Open(const FileCacheConfig& config, std::unique_ptr<Backend>& backend) {
        Status status = CheckConfig(config);
        if (!status.ok()) {
            return status;
        }
        std::unique_ptr<FileCache> cache(new FileCache(config));
        status = cache->files_.Open(config);
        if (!status.ok()) {
            return status;
        }
        auto num_chunks = static_cast<std::uint64_t>(config.cacheCapacity / config.chunkSize);
        cache->room_ = std::make_unique<ChunkRoom>(cache->files_, num_chunks * cache->files_.file_bytes());
        if (!cache->room_->Open()) {
            return SystemFailure("the chunk folder " + config.root + " cannot be used", errno);
        }
        cache->keeper_ = std::thread([kept = cache.get()] { kept->Keep(); });
        backend = std::move(cache);
        return Status::OK();
    }

    ~FileCache() override {
        if (getpid() != pid_) {  // in a forked child the thread is not here, and the files are the parent's
            keeper_.detach();
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_closing_ = true;
        }
        closing_.notify_all();
        if (keeper_.joinable()) {
            keeper_.join();
        }
        if (room_) {
            room_->Close();
        }
    }

    Status Update(const std::vector<int>& prefix, const std::vector<int>& tokens,
                  const std::vector<TokenTensors>& kv, std::size_t& updated) override {
        updated = 0;
        Status status = CheckCall(prefix, tokens, kv);
        if (!status.ok()) {
            return status;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<ChunkName> names = ChunkNames(config_, Ids(prefix, tokens));
        std::size_t num_prefix = prefix.size() / ChunkTokens();
        if (HasPrefix(names, num_prefix)) {
            updated = StoreChunks(names, num_prefix, kv) * ChunkTokens();
        }
        return Status::OK();
    }

    Status Query(const std::vector<int>& prefix, const std::vector<int>& tokens, std::vector<TokenTensors>& kv,
                 std::size_t& matched) override {
        matched = 0;
        Status status = CheckCall(prefix, tokens, kv);
        if (!status.ok()) {
            return status;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<ChunkName> names = ChunkNames(config_, Ids(prefix, tokens));
        std::size_t first = prefix.size() / ChunkTokens();
        std::size_t at = first;
        std::vector<struct timespec> used_at(names.size());
        if (!HasPrefix(names, first)) {
            return Status::OK();
        }
        while (at < names.size() &&
               files_.Read(names[at], PayloadOf(kv, at - first), used_at[at]) == Found::kHit) {
            at++;
        }
        for (std::size_t i = at; i-- > first;) {  // the end first: its use is the older one
            Use(names[i], Seconds(used_at[i]));
        }
        matched = (at - first) * ChunkTokens();
        return Status::OK();
    }

   private:
    static constexpr double kTouchS = 5.0;

    explicit FileCache(const FileCacheConfig& config) : config_(config) {}

    static Status CheckConfig(const FileCacheConfig& config) {
        Status status = CheckShape(config);
        if (!status.ok()) {
            return status;
        }
        if (config.chunkSize <= 0 || config.chunkSize > 1 << 20 || config.hashChunkSize < 1 ||
            config.hashChunkSize > 8) {
            return Status::Invalid("chunkSize must be from 1 to 2^20, and folders have from 1 to 8 digits");
        }
        if (config.clientGCInterval <= 0 || config.ttl <= 0 || config.globalGCInterval <= 0 || config.globalTTL <= 0) {
            return Status::Invalid("times of collection must be positive numbers of seconds");
        }
        if (config.cacheCapacity < config.chunkSize) {
            return Status::Invalid("a cacheCapacity of " + std::to_string(config.cacheCapacity) +
                                   " tokens has no room for one chunk of " + std::to_string(config.chunkSize));
        }
        if (2 * static_cast<std::uint64_t>(config.layer) * static_cast<std::uint64_t>(config.tensorByte) >
            kMaxChunkBytes / static_cast<std::uint64_t>(config.chunkSize)) {
            return Status::Invalid("a chunk has more than a tebibyte");
        }
        return Status::OK();
    }

    Status CheckCall(const std::vector<int>& prefix, const std::vector<int>& tokens,
                     const std::vector<TokenTensors>& kv) const {
        Status status = CheckTokens(prefix);
        if (status.ok()) {
            status = CheckTokens(tokens);
        }
        if (status.ok()) {
            status = CheckTensors(kv, tokens.size(), config_, true);
        }
        if (status.ok() && prefix.size() % ChunkTokens()) {
            return Status::Invalid("a prefix of " + std::to_string(prefix.size()) + " tokens is not whole chunks of " +
                                   std::to_string(ChunkTokens()));
        }
        return status;
    }

    std::size_t ChunkTokens() const { return static_cast<std::size_t>(config_.chunkSize); }

    Payload PayloadOf(const std::vector<TokenTensors>& kv, std::size_t chunk) const {
        return Payload(kv.data() + chunk * ChunkTokens(), ChunkTokens(), static_cast<std::uint64_t>(config_.tensorByte));
    }

    bool HasPrefix(const std::vector<ChunkName>& names, std::size_t num_prefix) {
        for (std::size_t i = num_prefix; i-- > 0;) {
            struct stat status;
            if (!files_.Stat(names[i], status)) {
                return false;
            }
            Use(names[i], Seconds(status.st_mtim));
        }
        return true;
    }

    // The number of chunks after the prefix without a gap, once absent ones were stored.
    std::size_t StoreChunks(const std::vector<ChunkName>& names, std::size_t num_prefix,
                            const std::vector<TokenTensors>& kv) {
        std::vector<std::size_t> absent;
        std::unordered_set<std::string> kept;
        for (std::size_t i = 0; i < names.size(); i++) {
            struct stat status;
            if (i < num_prefix || files_.Stat(names[i], status)) {
                kept.insert(files_.PathOf(names[i]));
                if (i >= num_prefix) {
                    Use(names[i], Seconds(status.st_mtim));
                }
            } else {
                absent.push_back(i);
            }
        }
        std::size_t num_written = absent.empty() ? 0 : Write(names, absent, num_prefix, kv, kept);
        return (num_written < absent.size() ? absent[num_written] : names.size()) - num_prefix;
    }

    std::size_t Write(const std::vector<ChunkName>& names, const std::vector<std::size_t>& absent,
                      std::size_t num_prefix, const std::vector<TokenTensors>& kv,
                      const std::unordered_set<std::string>& kept) {
        std::uint64_t unit = files_.file_bytes();
        std::uint64_t granted = room_->Reserve(absent.size() * unit, kept);
        std::size_t num_written = 0;
        while (num_written < granted / unit) {
            std::size_t at = absent[num_written];
            if (!files_.Write(names[at], PayloadOf(kv, at - num_prefix))) {
                break;
            }
            used_paths_.insert(files_.PathOf(names[at]));
            num_written++;
        }
        room_->Settle(num_written * unit, granted - num_written * unit);
        return num_written;
    }

    // Make the file's time the filesystem's now, unless it nearly is.
    void Use(const ChunkName& name, double used_at) {
        std::string path = files_.PathOf(name);
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        double touch_s = std::min({kTouchS, config_.ttl / 10.0, config_.globalTTL / 10.0});
        double age_s = Seconds(now) - used_at;
        if (age_s > touch_s || age_s < -touch_s) {
            utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
        }
        used_paths_.insert(std::move(path));
    }

    // The keeper's thread.
    void Keep() {
        using Clock = std::chrono::steady_clock;
        auto own_at = Clock::now() + std::chrono::seconds(config_.clientGCInterval);
        auto all_at = Clock::now() + std::chrono::seconds(config_.globalGCInterval);
        std::unique_lock<std::mutex> lock(mutex_);
        room_->Sweep();  // chunks stay: a client with a small capacity that only reads must not empty the folder
        double beat_s = std::min({kBeatS, static_cast<double>(config_.clientGCInterval),
                                  static_cast<double>(config_.globalGCInterval)});
        while (!closing_.wait_for(lock, std::chrono::duration<double>(beat_s), [this] { return is_closing_; })) {
            room_->Beat();
            auto now = Clock::now();
            if (now >= own_at) {
                own_at = now + std::chrono::seconds(config_.clientGCInterval);
                room_->ExpireOf(used_paths_, config_.ttl);
                room_->Trim();
            }
            if (config_.enableGlobalGC && now >= all_at) {
                all_at = now + std::chrono::seconds(config_.globalGCInterval);
                room_->Expire(config_.globalTTL);
            }
        }
    }

    static constexpr std::uint64_t kMaxChunkBytes = std::uint64_t{1} << 40;

    const pid_t pid_ = getpid();
    FileCacheConfig config_;
    ChunkFiles files_;
    std::unique_ptr<ChunkRoom> room_;
    std::unordered_set<std::string> used_paths_;
    std::mutex mutex_;
    std::condition_variable closing_;
    bool is_closing_ = false;
    std::thread keeper_;
};

}  // namespace detail
}  // namespace kvtier

#endif
