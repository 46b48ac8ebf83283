// Chunks as files of one folder, which any number of processes and hosts write and read; the format is Python's.
//
// A chunk is the KV of some consecutive tokens; its name is a hash of all tokens up to its end, so a file never
// changes. It is written to a temporary file (__temp), synced and renamed. A file is a row of segments of 4 MiB,
// the last one shorter; each begins with a page that names the chunk, the segment and a checksum over both and its bytes.
#ifndef KVTIER_CHUNK_FILES_HPP
#define KVTIER_CHUNK_FILES_HPP

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "kvtier/kv_tensor.hpp"

namespace kvtier {
namespace detail {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kSegmentBytes = std::uint64_t{4} << 20;
constexpr std::uint64_t kBodyBytes = kSegmentBytes - kPageBytes;
constexpr mode_t kWritableByOthers = S_IWGRP | S_IWOTH;

inline std::uint64_t WholePages(std::uint64_t num_bytes) {
    return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

inline std::string Hex(const std::uint8_t* bytes, std::size_t num_bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string text;
    for (std::size_t i = 0; i < num_bytes; i++) {
        text += digits[bytes[i] >> 4];
        text += digits[bytes[i] & 15];
    }
    return text;
}

inline Status SystemFailure(const std::string& what, int error) {
    return Status(KVT_UNAVAILABLE, what + ": " + std::strerror(error));
}

// Murmur3 of 32 bits and seed 0, over whole words, that can be asked for on the way.
class Murmur {
   public:
    void Add(std::uint32_t word) {
        word *= 0xcc9e2d51U;
        word = word << 15 | word >> 17;
        word *= 0x1b873593U;
        hash_ ^= word;
        hash_ = hash_ << 13 | hash_ >> 19;
        hash_ = hash_ * 5 + 0xe6546b64U;
        num_bytes_ += 4;
    }

    std::uint32_t Digest() const {
        std::uint32_t hash = hash_ ^ num_bytes_;
        hash ^= hash >> 16;
        hash *= 0x85ebca6bU;
        hash ^= hash >> 13;
        hash *= 0xc2b2ae35U;
        return hash ^ hash >> 16;
    }

   private:
    std::uint32_t hash_ = 0;
    std::uint32_t num_bytes_ = 0;
};

// Where a chunk lies: `folder` is for people and for the size of folders, `digest` is the identity.
struct ChunkName {
    std::string folder;
    std::string file;
    std::uint8_t digest[KVT_HASH_BYTES];
};

inline void PutLittleEndian(std::uint8_t* at, std::uint64_t number, int width) {
    for (int i = 0; i < width; i++) {
        at[i] = static_cast<std::uint8_t>(number >> 8 * i);
    }
}

// The names of all full chunks of a sequence, in caches of one shape.
inline std::vector<ChunkName> ChunkNames(const FileCacheConfig& config, const std::vector<std::uint32_t>& ids) {
    static const char kIdentity[] = "kvtier vineyard chunk 1";
    std::uint8_t shape[24];
    PutLittleEndian(shape, static_cast<std::uint64_t>(config.tensorByte), 8);
    PutLittleEndian(shape + 8, static_cast<std::uint64_t>(config.layer), 8);
    PutLittleEndian(shape + 16, static_cast<std::uint64_t>(config.chunkSize), 8);
    const kvt_run runs[] = {{kIdentity, sizeof kIdentity - 1}, {shape, sizeof shape}};
    std::uint8_t identity[KVT_HASH_BYTES];
    kvt_digest(runs, 2, identity);

    auto chunk_tokens = static_cast<std::uint32_t>(config.chunkSize);
    std::vector<std::uint8_t> digests(ids.size() / chunk_tokens * KVT_HASH_BYTES);
    std::size_t count = kvt_hash_blocks(identity, nullptr, ids.data(), ids.size(), chunk_tokens, digests.data());
    std::vector<ChunkName> names(count);
    Murmur murmur;
    for (std::size_t i = 0; i < count; i++) {
        for (std::size_t token = 0; token < chunk_tokens; token++) {
            murmur.Add(ids[i * chunk_tokens + token]);
        }
        std::uint8_t raw[4];
        for (int byte = 0; byte < 4; byte++) {
            raw[byte] = static_cast<std::uint8_t>(murmur.Digest() >> (24 - 8 * byte));
        }
        std::memcpy(names[i].digest, digests.data() + i * KVT_HASH_BYTES, KVT_HASH_BYTES);
        names[i].folder = Hex(raw, 4).substr(0, static_cast<std::size_t>(config.hashChunkSize));
        names[i].file = Hex(names[i].digest, KVT_HASH_BYTES) + "-" + std::to_string(i);
    }
    return names;
}

// --- owners -----------------------------------------------------------------------------------------------------------

inline std::string ReadFile(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// This machine since its start, and the processes that see each other's numbers on it; empty if that is not known.
inline std::string Machine() {
    std::string boot = ReadFile("/proc/sys/kernel/random/boot_id");
    char space[128];
    ssize_t length = readlink("/proc/self/ns/pid", space, sizeof space);
    if (boot.empty() || length <= 0) {
        return "";
    }
    std::string seen = boot + std::string(space, static_cast<std::size_t>(length));
    const kvt_run run = {seen.data(), seen.size()};
    std::uint8_t digest[KVT_HASH_BYTES];
    kvt_digest(&run, 1, digest);
    return Hex(digest, 6);
}

// When a process began, in the kernel's ticks; empty if there is none.
inline std::string StartedAt(long pid) {
    std::string text = ReadFile("/proc/" + std::to_string(pid) + "/stat");
    std::size_t end = text.rfind(')');
    if (end == std::string::npos) {
        return "";
    }
    std::istringstream words(text.substr(end + 1));
    std::string word;
    for (int i = 0; i < 20; i++) {
        words >> word;
    }
    return word;
}

inline std::string RandomHex(std::size_t num_bytes) {
    std::vector<std::uint8_t> bytes(num_bytes);
    if (getrandom(bytes.data(), num_bytes, 0) != static_cast<ssize_t>(num_bytes)) {
        return Hex(bytes.data(), num_bytes) + "x";
    }
    return Hex(bytes.data(), num_bytes);
}

// A name that no other owner of temporary files has.
inline std::string OwnerName() {
    std::string machine = Machine();
    long pid = static_cast<long>(getpid());
    return (machine.empty() ? RandomHex(6) : machine) + "." + std::to_string(pid) + "." + StartedAt(pid) + "." +
           RandomHex(4);
}

// The owner was a process of this machine and has ended. Of other machines' processes nothing is known.
inline bool IsSurelyDead(const std::string& owner) {
    std::vector<std::string> parts;
    std::istringstream words(owner);
    for (std::string part; std::getline(words, part, '.');) {
        parts.push_back(part);
    }
    if (parts.size() != 4 || parts[0] != Machine() || parts[1].empty() || parts[1].size() > 9 ||
        parts[1].find_first_not_of("0123456789") != std::string::npos) {
        return false;
    }
    return StartedAt(std::atol(parts[1].c_str())) != parts[2];
}

// --- trust ------------------------------------------------------------------------------------------------------------

inline std::string ParentOf(const std::string& path) {
    std::size_t slash = path.find_last_of('/');
    return slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
}

inline Status CheckOnePath(const std::string& path, bool is_own, uid_t own_uid) {
    struct stat status;
    if (lstat(path.c_str(), &status) != 0) {
        return SystemFailure("the chunk folder " + path + " cannot be used", errno);
    }
    static const char kAdvice[] =
        ", who could give us wrong KV: use a folder of your own, or isShared if all who can write there are trusted";
    bool is_trusted = status.st_uid == own_uid || (!is_own && (status.st_uid == geteuid() || status.st_uid == 0));
    if (!is_trusted) {
        return Status::Invalid(path + " belongs to another user" + kAdvice);
    }
    bool is_open = (status.st_mode & kWritableByOthers) && !(status.st_mode & S_ISVTX);
    if (is_open && !S_ISLNK(status.st_mode)) {
        return Status::Invalid(path + " can be written to by other users" + kAdvice);
    }
    return Status::OK();
}

// No other user made this folder, can write into it, or can put another one in its place.
inline Status CheckFolder(const std::string& folder, uid_t own_uid) {
    char resolved[PATH_MAX];
    if (!realpath(folder.c_str(), resolved)) {
        return SystemFailure("the chunk folder " + folder + " cannot be used", errno);
    }
    char resolved_parent[PATH_MAX];
    if (!realpath(ParentOf(folder).c_str(), resolved_parent)) {
        return SystemFailure("the chunk folder " + folder + " cannot be used", errno);
    }
    std::set<std::string> own = {resolved, resolved_parent};
    std::set<std::string> paths = own;
    for (std::string path : {ParentOf(folder), ParentOf(resolved)}) {
        paths.insert(path);
        while (path != "/") {
            path = ParentOf(path);
            paths.insert(path);
        }
    }
    for (const std::string& path : paths) {
        Status status = CheckOnePath(path, own.count(path) != 0, own_uid);
        if (!status.ok()) {
            return status;
        }
    }
    return Status::OK();
}

// --- files ------------------------------------------------------------------------------------------------------------

class Descriptor {
   public:
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() { Close(); }
    int get() const { return fd_; }
    bool Close() {
        int fd = fd_;
        fd_ = -1;
        return fd < 0 || close(fd) == 0;
    }

   private:
    int fd_;
};

// A chunk's payload in the caller's memory: tensors of equal size, one after the other.
class Payload {
   public:
    Payload(const TokenTensors* tokens, std::size_t num_tokens, std::uint64_t tensor_bytes)
        : tokens_(tokens), num_layers_(tokens->size()), tensor_bytes_(tensor_bytes) {
        num_bytes_ = 2 * num_tokens * num_layers_ * tensor_bytes;
    }

    std::uint64_t num_bytes() const { return num_bytes_; }

    // Copy bytes start .. end to or from `memory`.
    void CopyOut(std::uint8_t* memory, std::uint64_t start, std::uint64_t end) const { Move(memory, start, end, true); }
    void CopyIn(std::uint8_t* memory, std::uint64_t start, std::uint64_t end) const { Move(memory, start, end, false); }

   private:
    void Move(std::uint8_t* memory, std::uint64_t start, std::uint64_t end, bool is_out) const {
        for (std::uint64_t at = start; at < end;) {
            std::uint64_t tensor = at / tensor_bytes_;
            std::uint64_t skipped = at % tensor_bytes_;
            std::uint64_t length = std::min(tensor_bytes_ - skipped, end - at);
            const auto& pair = tokens_[tensor / 2 / num_layers_][tensor / 2 % num_layers_];
            auto* own = static_cast<std::uint8_t*>(tensor % 2 ? pair.second.data : pair.first.data) + skipped;
            if (is_out) {
                std::memcpy(memory + (at - start), own, length);
            } else {
                std::memcpy(own, memory + (at - start), length);
            }
            at += length;
        }
    }

    const TokenTensors* tokens_;
    std::size_t num_layers_;
    std::uint64_t tensor_bytes_;
    std::uint64_t num_bytes_;
};

enum class Found { kHit, kMiss, kDamaged };

// The files of chunks of one size under a root. The caller locks.
class ChunkFiles {
   public:
    Status Open(const FileCacheConfig& config) {
        char own[PATH_MAX];
        if (config.root.empty() || config.root.find('\0') != std::string::npos) {
            return Status::Invalid("root must be the path of a folder");
        }
        root_ = config.root;
        while (root_.size() > 1 && root_.back() == '/') {
            root_.pop_back();
        }
        if (root_[0] != '/' && getcwd(own, sizeof own)) {
            root_ = std::string(own) + "/" + root_;
        }
        temp_ = root_ + "/__temp";
        is_shared_ = config.isShared;
        payload_bytes_ = 2 * static_cast<std::uint64_t>(config.layer) * static_cast<std::uint64_t>(config.tensorByte) *
                         static_cast<std::uint64_t>(config.chunkSize);
        num_segments_ = (payload_bytes_ + kBodyBytes - 1) / kBodyBytes;
        file_bytes_ = (num_segments_ - 1) * kSegmentBytes + kPageBytes +
                      WholePages(payload_bytes_ - (num_segments_ - 1) * kBodyBytes);
        owner_ = OwnerName();
        staging_.resize(std::min(kSegmentBytes, file_bytes_));
        return Probe();
    }

    const std::string& root() const { return root_; }
    const std::string& temp() const { return temp_; }
    const std::string& owner() const { return owner_; }
    std::uint64_t file_bytes() const { return file_bytes_; }
    std::uint64_t payload_bytes() const { return payload_bytes_; }

    std::string PathOf(const ChunkName& name) const { return root_ + "/" + name.folder + "/" + name.file; }

    // A file that looks whole.
    bool Stat(const ChunkName& name, struct stat& status) const {
        return stat(PathOf(name).c_str(), &status) == 0 && IsWhole(status) && IsTrusted(status);
    }

    bool MakeTempFolder() const {
        for (std::size_t slash = root_.find('/', 1); slash != std::string::npos; slash = root_.find('/', slash + 1)) {
            mkdir(root_.substr(0, slash).c_str(), 0700);
        }
        mkdir(root_.c_str(), 0700);
        return mkdir(temp_.c_str(), 0700) == 0 || errno == EEXIST;
    }

    // True once the chunk is in its place; nothing is left behind otherwise.
    bool Write(const ChunkName& name, const Payload& payload) {
        std::string path = temp_ + "/" + owner_ + "-" + std::to_string(next_number_++) + ".tmp";
        int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0 && errno == ENOENT && MakeTempFolder()) {
            fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        }
        if (fd < 0) {
            return false;
        }
        Descriptor file(fd);
        bool is_written = true;
        for (std::uint64_t segment = 0; is_written && segment < num_segments_; segment++) {
            is_written = WriteSegment(fd, name, segment, payload);
        }
        is_written = is_written && fsync(fd) == 0 && file.Close() && PutInPlace(path, name);
        if (!is_written) {
            unlink(path.c_str());
        }
        return is_written;
    }

    // Fill the payload. A file that can never be a chunk is removed; `used_at` is when it was last used.
    Found Read(const ChunkName& name, const Payload& payload, struct timespec& used_at) {
        std::string path = PathOf(name);
        // Not blocking: whatever lies in a chunk's place, a pipe too, opening it must not wait.
        int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd < 0) {
            return Found::kMiss;
        }
        Descriptor file(fd);
        struct stat status;
        if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || !IsTrusted(status)) {
            return Found::kMiss;
        }
        used_at = status.st_mtim;
        bool is_right = IsWhole(status);
        for (std::uint64_t segment = 0; is_right && segment < num_segments_; segment++) {
            int error = 0;
            is_right = ReadSegment(fd, name, segment, payload, error);
            if (error) {
                return Found::kMiss;  // it may be read again
            }
        }
        if (!is_right) {
            unlink(path.c_str());
            return Found::kDamaged;
        }
        return Found::kHit;
    }

   private:
    static constexpr int kRenameTries = 4;

    bool IsWhole(const struct stat& status) const {
        return S_ISREG(status.st_mode) && static_cast<std::uint64_t>(status.st_size) == file_bytes_;
    }

    bool IsTrusted(const struct stat& status) const {
        return is_shared_ || (status.st_uid == own_uid_ && !(status.st_mode & kWritableByOthers));
    }

    // Write a few bytes like a chunk, to check that writing works and which user owns the file.
    Status Probe() {
        std::string path = temp_ + "/" + owner_ + "-probe.tmp";
        int fd = MakeTempFolder() ? open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : -1;
        if (fd < 0) {
            return SystemFailure("the chunk folder " + root_ + " cannot be used", errno);
        }
        Descriptor file(fd);
        struct stat status;
        bool is_right = WriteAll(fd, staging_.data(), kPageBytes, 0) && fsync(fd) == 0 && fstat(fd, &status) == 0;
        int error = errno;
        unlink(path.c_str());
        if (!is_right) {
            return SystemFailure("the chunk folder " + root_ + " cannot be used", error);
        }
        own_uid_ = status.st_uid;  // a server of files may give us another number
        return is_shared_ ? Status::OK() : CheckFolder(temp_, own_uid_);
    }

    void Range(std::uint64_t segment, std::uint64_t& start, std::uint64_t& end) const {
        start = segment * kBodyBytes;
        end = std::min(start + kBodyBytes, payload_bytes_);
    }

    std::uint64_t Sum(const ChunkName& name, std::uint64_t segment, std::uint64_t num_bytes) const {
        const kvt_run runs[] = {{name.digest, KVT_HASH_BYTES}, {staging_.data() + kPageBytes, num_bytes}};
        return kvt_sum(segment, runs, 2);
    }

    void MakeHead(std::uint8_t* head, const ChunkName& name, std::uint64_t segment, std::uint64_t num_bytes) const {
        std::memcpy(head, "kvchunk1", 8);
        std::memcpy(head + 8, name.digest, KVT_HASH_BYTES);
        PutLittleEndian(head + 40, segment, 4);
        PutLittleEndian(head + 44, num_bytes, 4);
        PutLittleEndian(head + 48, Sum(name, segment, num_bytes), 8);
    }

    bool WriteSegment(int fd, const ChunkName& name, std::uint64_t segment, const Payload& payload) {
        std::uint64_t start = 0, end = 0;
        Range(segment, start, end);
        std::uint64_t padded = WholePages(end - start);
        payload.CopyOut(staging_.data() + kPageBytes, start, end);
        std::memset(staging_.data() + kPageBytes + (end - start), 0, padded - (end - start));
        std::memset(staging_.data(), 0, kPageBytes);
        MakeHead(staging_.data(), name, segment, end - start);
        return WriteAll(fd, staging_.data(), kPageBytes + padded, segment * kSegmentBytes);
    }

    bool ReadSegment(int fd, const ChunkName& name, std::uint64_t segment, const Payload& payload, int& error) {
        std::uint64_t start = 0, end = 0;
        Range(segment, start, end);
        if (!ReadAll(fd, kPageBytes + WholePages(end - start), segment * kSegmentBytes, error)) {
            return false;
        }
        std::uint8_t expected[56];
        MakeHead(expected, name, segment, end - start);
        if (std::memcmp(staging_.data(), expected, sizeof expected) != 0) {
            return false;
        }
        payload.CopyIn(staging_.data() + kPageBytes, start, end);
        return true;
    }

    static bool WriteAll(int fd, const std::uint8_t* bytes, std::uint64_t num_bytes, std::uint64_t offset) {
        while (num_bytes) {
            ssize_t written = pwrite(fd, bytes, num_bytes, static_cast<off_t>(offset));
            if (written < 0 && errno == EINTR) {
                continue;
            }
            if (written <= 0) {
                return false;
            }
            bytes += written;
            num_bytes -= static_cast<std::uint64_t>(written);
            offset += static_cast<std::uint64_t>(written);
        }
        return true;
    }

    bool ReadAll(int fd, std::uint64_t num_bytes, std::uint64_t offset, int& error) {
        std::uint8_t* at = staging_.data();
        while (num_bytes) {
            ssize_t length = pread(fd, at, num_bytes, static_cast<off_t>(offset));
            if (length < 0 && errno == EINTR) {
                continue;
            }
            if (length <= 0) {
                error = length < 0 ? errno : 0;
                return false;
            }
            at += length;
            num_bytes -= static_cast<std::uint64_t>(length);
            offset += static_cast<std::uint64_t>(length);
        }
        return true;
    }

    bool PutInPlace(const std::string& path, const ChunkName& name) const {
        std::string target = PathOf(name);
        for (int attempt = 0; attempt < kRenameTries; attempt++) {
            if (rename(path.c_str(), target.c_str()) == 0) {
                return true;
            }
            if (errno != ENOENT) {
                return false;
            }
            mkdir(ParentOf(target).c_str(), 0700);  // the first of its folder, or an empty one was removed
        }
        return false;
    }

    std::string root_;
    std::string temp_;
    std::string owner_;
    bool is_shared_ = false;
    uid_t own_uid_ = 0;
    std::uint64_t payload_bytes_ = 0;
    std::uint64_t num_segments_ = 0;
    std::uint64_t file_bytes_ = 0;
    std::uint64_t next_number_ = 0;
    std::vector<std::uint8_t> staging_;
};

}  // namespace detail
}  // namespace kvtier

#endif
