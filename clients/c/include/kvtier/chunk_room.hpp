// The bytes of chunks that a folder may hold, over all processes that write into it, and the order of their removal.
//
// No process keeps the folder's books: a listing of the folder is the truth. A writer first announces its bytes, as the
// size of a sparse file of its own in the temp folder, then lists the folder, counting every announcement, and writes
// only what fits. Times are the filesystem's own. The file format is Python's.
#ifndef KVTIER_CHUNK_ROOM_HPP
#define KVTIER_CHUNK_ROOM_HPP

#include <dirent.h>
#include <sys/time.h>

#include <chrono>
#include <functional>
#include <random>
#include <thread>
#include <unordered_set>

#include "kvtier/chunk_files.hpp"

namespace kvtier {
namespace detail {

constexpr double kBeatS = 15.0;   // how often a writer shows that it lives
constexpr double kStaleS = 60.0;  // after this long without a sign of life a writer of another host is taken for dead
constexpr double kBucketS = 5.0;  // times of use in the same bucket are about the same

inline double Seconds(const struct timespec& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

inline bool EndsWith(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

inline bool IsOf(const std::string& text, const char* characters) {
    return !text.empty() && text.find_first_not_of(characters) == std::string::npos;
}

// What is in a folder; nothing if it is none, has just gone or is closed to us.
inline std::vector<std::string> EntriesOf(const std::string& folder) {
    std::vector<std::string> names;
    if (DIR* listing = opendir(folder.c_str())) {
        while (const dirent* entry = readdir(listing)) {
            names.emplace_back(entry->d_name);
        }
        closedir(listing);
    }
    return names;
}

inline bool StatFile(const std::string& path, struct stat& status) {
    return lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

// The share of a folder's bound that this process has, and the removal of what is old. The caller locks.
class ChunkRoom {
   public:
    ChunkRoom(ChunkFiles& files, std::uint64_t bound_bytes) : files_(files), bound_bytes_(bound_bytes) {
        path_ = files.temp() + "/" + files.owner() + "-" + std::to_string(files.file_bytes()) + "-" +
                std::to_string(bound_bytes) + ".room";
    }

    bool Open() { return Publish(); }

    // Bytes that may be written now: `num_bytes`, or less if the rest of the bound is in use or in `kept`. The coldest
    // chunks go to make room. Give the bytes back with Settle().
    std::uint64_t Reserve(std::uint64_t num_bytes, const std::unordered_set<std::string>& kept) {
        is_idle_ = false;
        if (spare_ < num_bytes) {
            Grow(num_bytes, kept);
        }
        std::uint64_t granted = std::min(num_bytes, spare_);
        spare_ -= granted;
        in_flight_ += granted;
        return granted;
    }

    void Settle(std::uint64_t written, std::uint64_t unused) {
        in_flight_ -= written + unused;
        spare_ += unused;
        Publish();
    }

    // Show that this process lives; give back what it has not used since the last time.
    void Beat() {
        if (is_idle_) {
            spare_ = 0;
        }
        is_idle_ = true;
        Publish();
    }

    // Remove all chunks that have been unused for that long.
    void Expire(double max_age_s) {
        double now = Now();
        Listing listing = List(now);
        for (const auto* chunks : {&listing.chunks, &listing.others}) {
            for (const Chunk& chunk : *chunks) {
                if (now - chunk.used_at > max_age_s) {
                    unlink(chunk.path.c_str());
                }
            }
        }
    }

    // Of these files, remove those unused for that long, and forget those that no longer exist.
    void ExpireOf(std::unordered_set<std::string>& paths, double max_age_s) {
        double now = Now();
        for (auto path = paths.begin(); path != paths.end();) {
            struct stat status;
            bool is_gone = stat(path->c_str(), &status) != 0 ||
                           (now - Seconds(status.st_mtim) > max_age_s && unlink(path->c_str()) == 0);
            path = is_gone ? paths.erase(path) : std::next(path);
        }
    }

    // Remove what dead writers left, and no chunk.
    void Sweep() { Announced(Now()); }

    // Remove the coldest chunks beyond the bound.
    void Trim() {
        Listing listing = List(Now());
        std::uint64_t total = listing.Total();
        if (total > listing.bound_bytes) {
            Evict(listing.chunks, total - listing.bound_bytes);
        }
    }

    void Close() { unlink(path_.c_str()); }

   private:
    static constexpr std::uint64_t kMaxShareBytes = std::uint64_t{4} << 30;
    static constexpr std::uint64_t kSpareShare = 16;
    static constexpr int kTries = 8;

    struct Chunk {
        std::string path;
        std::uint64_t num_bytes;
        double used_at;
        long depth;

        // Of chunks used at about the same time, a prompt's end goes before its beginning.
        bool IsColderThan(const Chunk& other) const {
            auto bucket = static_cast<std::int64_t>(used_at / kBucketS);
            auto other_bucket = static_cast<std::int64_t>(other.used_at / kBucketS);
            if (bucket != other_bucket) {
                return bucket < other_bucket;
            }
            return depth != other.depth ? depth > other.depth : used_at < other.used_at;
        }
    };

    // What the living writers have announced and, of the folder, chunks of our size and others.
    struct Listing {
        std::uint64_t bound_bytes = 0;
        std::uint64_t announced_bytes = 0;
        std::uint64_t num_writers = 0;
        std::vector<Chunk> chunks;
        std::vector<Chunk> others;

        std::uint64_t Total() const {
            std::uint64_t total = announced_bytes;
            for (const Chunk& chunk : chunks) {
                total += chunk.num_bytes;
            }
            return total;
        }
    };

    // Announce until `num_bytes` are spare or the bound has no more to give.
    void Grow(std::uint64_t num_bytes, const std::unordered_set<std::string>& kept) {
        std::uint64_t unit = files_.file_bytes();
        num_bytes = std::min(num_bytes, Announced(Now()).bound_bytes / unit * unit);
        std::minstd_rand random(std::random_device{}());
        for (int attempt = 0; attempt < kTries; attempt++) {
            if (attempt) {
                std::this_thread::sleep_for(std::chrono::milliseconds(random() % (20 * attempt) + 1));
            }
            std::uint64_t before = spare_;
            std::uint64_t wanted = num_bytes > before ? num_bytes - before : 0;
            std::uint64_t extra = Share();
            spare_ = before + wanted + extra;
            if (!Publish()) {
                spare_ = before;
                return;
            }
            Listing listing = List(Now());
            std::uint64_t total = listing.Total();
            std::uint64_t over = total > listing.bound_bytes ? total - listing.bound_bytes : 0;
            if (over > extra) {
                over -= std::min(over, MakeRoom(listing, over, wanted, extra, kept));
            }
            std::uint64_t excess = std::min((over + unit - 1) / unit * unit, wanted + extra);
            spare_ -= excess;
            Publish();
            std::uint64_t own = in_flight_ + before + wanted + extra;
            if (spare_ >= num_bytes || listing.announced_bytes <= own) {
                return;
            }
        }
    }

    // Evict what is in the way of `wanted`, but nothing of `kept`, and nothing if that would make no room.
    std::uint64_t MakeRoom(const Listing& listing, std::uint64_t over, std::uint64_t wanted, std::uint64_t extra,
                           const std::unordered_set<std::string>& kept) {
        std::vector<Chunk> removable;
        for (const Chunk& chunk : listing.chunks) {
            if (!kept.count(chunk.path)) {
                removable.push_back(chunk);
            }
        }
        std::uint64_t unit = files_.file_bytes();
        std::uint64_t left = over > unit * removable.size() ? over - unit * removable.size() : 0;
        if (left + unit > wanted + extra) {
            return 0;
        }
        return Evict(removable, over - extra + extra / 2);
    }

    // What one writer may hold in advance: all of them together a small part of the bound. Whole chunks.
    std::uint64_t Share() const {
        std::uint64_t unit = files_.file_bytes();
        return std::min(kMaxShareBytes, bound_bytes_ / kSpareShare / num_writers_) / unit * unit;
    }

    std::uint64_t Evict(std::vector<Chunk> chunks, std::uint64_t num_bytes) {
        std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.IsColderThan(b); });
        std::uint64_t freed = 0;
        for (std::size_t i = 0; i < chunks.size() && freed < num_bytes; i++) {
            if (unlink(chunks[i].path.c_str()) == 0) {
                freed += chunks[i].num_bytes;
            }
        }
        return freed;
    }

    // Make our announcement as large as what we hold, and its time the filesystem's now.
    bool Publish() {
        auto num_bytes = static_cast<off_t>(in_flight_ + spare_);
        if (truncate(path_.c_str(), num_bytes) == 0) {
            return utimensat(AT_FDCWD, path_.c_str(), nullptr, 0) == 0;
        }
        if (errno != ENOENT || !files_.MakeTempFolder()) {
            return false;
        }
        Descriptor file(open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
        return file.get() >= 0 && ftruncate(file.get(), num_bytes) == 0;
    }

    // The filesystem's clock.
    double Now() {
        struct stat status;
        if (utimensat(AT_FDCWD, path_.c_str(), nullptr, 0) != 0) {
            Publish();
        }
        if (stat(path_.c_str(), &status) == 0) {
            return Seconds(status.st_mtim);
        }
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return Seconds(now);
    }

    // Announcements first: a chunk that is done while we look then counts twice rather than not at all.
    Listing List(double now) {
        Listing listing = Announced(now);
        for (const std::string& folder : EntriesOf(files_.root())) {
            if (folder.size() > 8 || !IsOf(folder, "0123456789abcdef")) {
                continue;
            }
            for (const std::string& name : EntriesOf(files_.root() + "/" + folder)) {
                AddChunk(listing, files_.root() + "/" + folder + "/" + name, name);
            }
        }
        num_writers_ = std::max<std::uint64_t>(1, listing.num_writers);
        return listing;
    }

    void AddChunk(Listing& listing, const std::string& path, const std::string& name) const {
        struct stat status;
        bool is_chunk = name.size() > 65 && name.size() <= 74 && name[64] == '-' &&
                        IsOf(name.substr(0, 64), "0123456789abcdef") && IsOf(name.substr(65), "0123456789");
        if (!is_chunk || !StatFile(path, status)) {
            return;
        }
        auto num_bytes = static_cast<std::uint64_t>(status.st_size);
        Chunk chunk = {path, num_bytes, Seconds(status.st_mtim), std::atol(name.c_str() + 65)};
        (num_bytes == files_.file_bytes() ? listing.chunks : listing.others).push_back(std::move(chunk));
    }

    // The contents of the temp folder. Removes leftovers of dead writers.
    Listing Announced(double now) {
        Listing listing;
        listing.bound_bytes = bound_bytes_;
        std::unordered_set<std::string> living;
        std::vector<std::pair<std::string, std::string>> temps;
        for (const std::string& name : EntriesOf(files_.temp())) {
            std::string path = files_.temp() + "/" + name;
            std::string owner = name.substr(0, name.find('-'));
            struct stat status;
            bool is_room = EndsWith(name, ".room");
            if ((!is_room && !EndsWith(name, ".tmp")) || !StatFile(path, status)) {
                continue;
            }
            if (!is_room) {
                temps.emplace_back(path, owner);
            } else if (path == path_ || !IsLeftBehind(path, status, owner, now)) {
                living.insert(owner);
                AddAnnouncement(listing, name, status);
            }
        }
        for (const auto& [path, owner] : temps) {  // part of what their owners have announced
            struct stat status;
            if (!living.count(owner) && StatFile(path, status)) {
                IsLeftBehind(path, status, owner, now);
            }
        }
        return listing;
    }

    void AddAnnouncement(Listing& listing, const std::string& name, const struct stat& status) const {
        std::size_t first = name.find('-');
        std::size_t second = first == std::string::npos ? first : name.find('-', first + 1);
        if (second == std::string::npos) {
            return;
        }
        std::string size = name.substr(first + 1, second - first - 1);
        std::string bound = name.substr(second + 1, name.size() - second - 1 - 5);
        if (size != std::to_string(files_.file_bytes()) || !IsOf(bound, "0123456789") || bound.size() > 19) {
            return;
        }
        listing.bound_bytes = std::max<std::uint64_t>(listing.bound_bytes, std::strtoull(bound.c_str(), nullptr, 10));
        listing.announced_bytes += static_cast<std::uint64_t>(status.st_size);
        listing.num_writers += status.st_size > 0;
    }

    bool IsLeftBehind(const std::string& path, const struct stat& status, const std::string& owner, double now) {
        struct stat again;
        bool is_silent = now - Seconds(status.st_mtim) > kStaleS && StatFile(path, again) &&
                         now - Seconds(again.st_mtim) > kStaleS;
        if (is_silent || IsSurelyDead(owner)) {
            unlink(path.c_str());
            return true;
        }
        return false;
    }

    ChunkFiles& files_;
    std::uint64_t bound_bytes_;
    std::string path_;
    std::uint64_t in_flight_ = 0;
    std::uint64_t spare_ = 0;
    std::uint64_t num_writers_ = 1;
    bool is_idle_ = true;
};

}  // namespace detail
}  // namespace kvtier

#endif
