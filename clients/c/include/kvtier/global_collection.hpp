// Collection of old chunks that goes on after a cache is closed, until the process ends, as Vineyard's global GC does.
#ifndef KVTIER_GLOBAL_COLLECTION_HPP
#define KVTIER_GLOBAL_COLLECTION_HPP

#include <condition_variable>
#include <map>
#include <mutex>

#include "kvtier/chunk_room.hpp"

namespace kvtier {
namespace detail {

// One thread for all folders of this process. Any thread may call.
class GlobalCollection {
   public:
    static GlobalCollection& OfProcess() {
        static GlobalCollection collection;
        return collection;
    }

    // Every `globalGCInterval` seconds, remove the chunks of the folder that have been unused for `globalTTL`.
    void Add(const FileCacheConfig& config) {
        std::lock_guard<std::mutex> lock(mutex_);
        folders_[config.root] = Folder{config, Clock::now() + std::chrono::seconds(config.globalGCInterval)};
        is_over_ = false;
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { Run(); });
        }
        changed_.notify_all();
    }

    // Collect nothing any more.
    void Stop() {
        std::unique_lock<std::mutex> lock(mutex_);
        folders_.clear();
        is_over_ = true;
        changed_.notify_all();
        lock.unlock();
        if (thread_.joinable()) {
            thread_.join();
        }
    }

   private:
    using Clock = std::chrono::steady_clock;

    struct Folder {
        FileCacheConfig config;
        Clock::time_point next_at;
    };

    GlobalCollection() = default;
    ~GlobalCollection() {
        if (getpid() == pid_) {
            Stop();
        } else if (thread_.joinable()) {  // in a forked child it is not here
            thread_.detach();
        }
    }

    void Run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!is_over_) {
            Clock::time_point next_at = Clock::now() + std::chrono::hours(1);
            for (auto& [root, folder] : folders_) {
                if (folder.next_at <= Clock::now()) {
                    Collect(folder.config);
                    folder.next_at = Clock::now() + std::chrono::seconds(folder.config.globalGCInterval);
                }
                next_at = std::min(next_at, folder.next_at);
            }
            changed_.wait_until(lock, next_at);
        }
    }

    static void Collect(const FileCacheConfig& config) {
        ChunkFiles files;
        if (files.Open(config).ok()) {
            ChunkRoom room(files, 0);
            room.Expire(config.globalTTL);
            room.Close();
        }
    }

    const pid_t pid_ = getpid();
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::string, Folder> folders_;
    bool is_over_ = false;
    std::thread thread_;
};

}  // namespace detail
}  // namespace kvtier

#endif
