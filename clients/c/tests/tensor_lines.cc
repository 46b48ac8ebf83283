// A KVCache for tests beside Python's: commands in lines on standard input, one line of answer each.
//
//     tensor_lines shared SOCKET NAME TENSOR_BYTES CAPACITY LAYERS [TOKEN]
//     tensor_lines files ROOT CHUNK_TOKENS TENSOR_BYTES CAPACITY LAYERS TTL_S GC_S
//     tensor_lines names TOKENS CHUNK_TOKENS TENSOR_BYTES - LAYERS    prints where the chunks of a sequence lie
//
// update PREFIX TOKENS | query PREFIX TOKENS: lists with commas, "-" for none. The bytes of a tensor follow from the sum
// of all tokens up to its own, its layer and whether it is K or V: a wrong one shows. release, close.
#include <iostream>
#include <sstream>

#include "kvtier.hpp"

namespace {

using kvtier::KVCache;
using kvtier::KVTensor;
using kvtier::Status;
using kvtier::TokenTensors;

std::vector<int> ReadTokens(const std::string& text) {
    std::vector<int> tokens;
    std::istringstream words(text == "-" ? "" : text);
    for (std::string word; std::getline(words, word, ',');) {
        tokens.push_back(std::stoi(word));
    }
    return tokens;
}

std::uint8_t ByteOf(unsigned sum, std::size_t layer, bool is_value, std::size_t at) {
    return static_cast<std::uint8_t>(31 * sum + 7 * layer + (is_value ? 3 : 0) + at);
}

// Tensors in memory of their own, one set for each token.
class Tensors {
   public:
    Tensors(std::size_t num_tokens, const kvtier::KVCacheConfig& config)
        : tensor_bytes_(static_cast<std::size_t>(config.tensorByte)), layers_(static_cast<std::size_t>(config.layer)) {
        memory_.resize(num_tokens * layers_ * 2 * tensor_bytes_);
        kv.resize(num_tokens);
        for (std::size_t i = 0; i < num_tokens * layers_; i++) {
            std::uint8_t* at = memory_.data() + 2 * i * tensor_bytes_;
            kv[i / layers_].emplace_back(KVTensor(at, tensor_bytes_), KVTensor(at + tensor_bytes_, tensor_bytes_));
        }
    }

    void Fill(const std::vector<int>& prefix, const std::vector<int>& tokens) {
        Each(prefix, tokens, tokens.size(), [](std::uint8_t& byte, std::uint8_t expected) { byte = expected; });
    }

    // Wrong bytes among the tensors of the first `count` tokens.
    std::size_t NumWrong(const std::vector<int>& prefix, const std::vector<int>& tokens, std::size_t count) {
        std::size_t num_wrong = 0;
        Each(prefix, tokens, count,
             [&num_wrong](std::uint8_t& byte, std::uint8_t expected) { num_wrong += byte != expected; });
        return num_wrong;
    }

    std::vector<TokenTensors> kv;

   private:
    template <typename Act>
    void Each(const std::vector<int>& prefix, const std::vector<int>& tokens, std::size_t count, Act act) {
        unsigned sum = 0;
        for (int token : prefix) {
            sum += static_cast<unsigned>(token);
        }
        for (std::size_t i = 0; i < count; i++) {
            sum += static_cast<unsigned>(tokens[i]);
            for (std::size_t layer = 0; layer < layers_; layer++) {
                for (bool is_value : {false, true}) {
                    KVTensor& tensor = is_value ? kv[i][layer].second : kv[i][layer].first;
                    for (std::size_t at = 0; at < tensor_bytes_; at++) {
                        act(static_cast<std::uint8_t*>(tensor.data)[at], ByteOf(sum, layer, is_value, at));
                    }
                }
            }
        }
    }

    std::size_t tensor_bytes_;
    std::size_t layers_;
    std::vector<std::uint8_t> memory_;
};

std::string Answer(KVCache& cache, const std::string& line) {
    std::istringstream words(line);
    std::string command, prefix_text, tokens_text;
    words >> command >> prefix_text >> tokens_text;
    if (command == "release") {
        cache.Release();
        return "released";
    }
    if (command == "close") {
        cache.Close();
        return "closed";
    }
    std::vector<int> prefix = ReadTokens(prefix_text), tokens = ReadTokens(tokens_text);
    Tensors tensors(tokens.size(), cache.Config());
    std::size_t count = 0;
    Status status;
    if (command == "update") {
        tensors.Fill(prefix, tokens);
        status = cache.Update(prefix, tokens, tensors.kv, count);
    } else {
        status = cache.Query(prefix, tokens, tensors.kv, count);
    }
    if (!status.ok()) {
        return "failed " + status.ToString();
    }
    std::string answer = command + " " + std::to_string(count);
    return command == "update" ? answer
                               : answer + " wrong " + std::to_string(tensors.NumWrong(prefix, tokens, count));
}

Status Open(int count, char** arguments, std::shared_ptr<KVCache>& cache) {
    auto number = [arguments](int at) { return std::stoi(arguments[at]); };
    if (std::string(arguments[1]) == "shared") {
        kvtier::VineyardCacheConfig config(number(4), number(5), number(6), 5, 3, "lock", arguments[3]);
        config.token = count > 7 ? arguments[7] : "";
        config.timeoutS = 60;
        return KVCache::Make(arguments[2], config, cache);
    }
    kvtier::FileCacheConfig config(number(4), number(5), number(6), number(3), 2, arguments[2], kvtier::LOCAL,
                                   number(8), number(7));
    return KVCache::Make(config, cache);
}

void PrintNames(char** arguments) {
    kvtier::FileCacheConfig config(std::stoi(arguments[4]), 1, std::stoi(arguments[6]), std::stoi(arguments[3]), 8);
    for (const auto& name : kvtier::detail::ChunkNames(config, kvtier::detail::Ids({}, ReadTokens(arguments[2])))) {
        std::cout << name.folder << "/" << name.file << std::endl;
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 7) {
        return 2;
    }
    if (std::string(arguments[1]) == "names") {
        PrintNames(arguments);
        return 0;
    }
    std::shared_ptr<KVCache> cache;
    Status status = Open(count, arguments, cache);
    std::cout << (status.ok() ? "done" : "failed " + status.ToString()) << std::endl;
    for (std::string line; status.ok() && std::getline(std::cin, line);) {
        std::cout << Answer(*cache, line) << std::endl;
    }
    return 0;
}
