// A program in the shape of Vineyard's own tests of its LLM KV cache, with kvtier's header in place of Vineyard's:
// rounds of prompts, token by token over shared memory, all at once over files.
//
//     vineyard_rounds --client-num N --vineyard-ipc-sockets SOCKET...    each client a thread of its own
//     vineyard_rounds --root FOLDER
#include <cstring>
#include <filesystem>
#include <thread>

#include "kvtier/vineyard.hpp"

using namespace vineyard;  // as such programs do

namespace {

const int kTensorBytes = 80;
const int kCapacity = 20;
const int kLayers = 3;

std::vector<std::vector<int>> Rounds() {
    std::vector<int> first;
    for (int token = 1; token < 70; token++) {
        first.push_back(token);
    }
    return {first, {1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14}, {1, 2, 3, 9, 10, 11, 12, 13, 14}, {1, 2, 3, 4, 5, 6}};
}

std::uint8_t ByteOf(int token, std::size_t layer, int at) {
    return static_cast<std::uint8_t>(static_cast<std::size_t>(token + at) + layer);
}

TokenTensors MakeTensors(int token) {
    TokenTensors tensors;
    for (std::size_t layer = 0; layer < kLayers; layer++) {
        LLMKV key(std::malloc(kTensorBytes), kTensorBytes);
        LLMKV value(std::malloc(kTensorBytes), kTensorBytes);
        for (int i = 0; i < kTensorBytes; i++) {
            static_cast<std::uint8_t*>(key.data)[i] = ByteOf(token, layer, i);
            static_cast<std::uint8_t*>(value.data)[i] = ByteOf(token, layer, i);
        }
        tensors.emplace_back(key, value);
    }
    return tensors;
}

void FreeTensors(const TokenTensors& tensors) {
    for (const auto& pair : tensors) {
        std::free(pair.first.data);
        std::free(pair.second.data);
    }
}

void CheckTensors(const TokenTensors& tensors, int token) {
    VINEYARD_ASSERT(tensors.size() == static_cast<std::size_t>(kLayers));
    for (std::size_t layer = 0; layer < tensors.size(); layer++) {
        VINEYARD_ASSERT(tensors[layer].first.length == static_cast<std::size_t>(kTensorBytes));
        for (int i = 0; i < kTensorBytes; i++) {
            VINEYARD_ASSERT(static_cast<std::uint8_t*>(tensors[layer].first.data)[i] == ByteOf(token, layer, i));
            VINEYARD_ASSERT(static_cast<std::uint8_t*>(tensors[layer].second.data)[i] == ByteOf(token, layer, i));
        }
    }
}

// Look each token up behind those before it, and store what is not there. Returns how many were found.
int InferTokenByToken(KVCacheManager& manager, const std::vector<int>& tokens) {
    std::vector<int> before;
    int num_found = 0;
    for (int token : tokens) {
        TokenTensors found(kLayers);
        if (manager.Query(before, token, found).ok()) {
            CheckTensors(found, token);
            num_found++;
        } else {
            TokenTensors made = MakeTensors(token);
            Status status = manager.Update(before, token, made);
            VLOG(100) << status.ToString();  // the cache may be full
            FreeTensors(made);
        }
        before.push_back(token);
    }
    return num_found;
}

void RunClient(const std::string& socket, VineyardCacheConfig config, int& num_found) {
    Client client;
    VINEYARD_CHECK_OK(client.Connect(socket));
    std::shared_ptr<KVCacheManager> manager;
    VINEYARD_CHECK_OK(KVCacheManager::Make(client, manager, config));
    for (int turn = 0; turn < 2; turn++) {
        for (const std::vector<int>& tokens : Rounds()) {
            num_found += InferTokenByToken(*manager, tokens);
        }
    }
    manager->Close();
    client.Disconnect();
}

void RunShared(const std::vector<std::string>& sockets) {
    VineyardCacheConfig config(kTensorBytes, kCapacity, kLayers, 5, 3, "rounds_lock", "rounds_object", "rounds_refcnt");
    std::vector<std::thread> threads;
    std::vector<int> num_found(sockets.size());
    for (std::size_t i = 0; i < sockets.size(); i++) {
        threads.emplace_back(RunClient, sockets[i], config, std::ref(num_found[i]));
    }
    for (std::size_t i = 0; i < threads.size(); i++) {
        threads[i].join();
        VINEYARD_ASSERT(num_found[i] > 0);
    }
    Client client;
    VINEYARD_CHECK_OK(client.Connect(sockets[0]));
    VINEYARD_CHECK_OK(KVCacheManager::ClearGlobalCache(client, config));
}

// Store a prompt at once and read it back: whole chunks of it.
void InferAtOnce(KVCacheManager& manager, const std::vector<int>& tokens) {
    std::vector<TokenTensors> made, into;
    for (int token : tokens) {
        made.push_back(MakeTensors(token));
        into.push_back(MakeTensors(0));
    }
    std::size_t updated = 0, matched = 0;
    VINEYARD_CHECK_OK(manager.Update(tokens, made, updated));
    VINEYARD_CHECK_OK(manager.Query(tokens, into, matched));
    VINEYARD_ASSERT(matched == updated && matched >= std::min<std::size_t>(tokens.size() / 4 * 4, kCapacity));
    for (std::size_t i = 0; i < matched; i++) {
        CheckTensors(into[i], tokens[i]);
    }
    for (std::size_t i = 0; i < tokens.size(); i++) {
        FreeTensors(made[i]);
        FreeTensors(into[i]);
    }
}

void RunRounds(FileCacheConfig config, int num_seconds) {
    std::shared_ptr<KVCacheManager> manager;
    VINEYARD_CHECK_OK(KVCacheManager::Make(manager, config));
    for (const std::vector<int>& tokens : Rounds()) {
        InferAtOnce(*manager, tokens);
    }
    std::this_thread::sleep_for(std::chrono::seconds(num_seconds));
    manager->Close();
}

bool HasFiles(const std::string& root) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
        if (entry.is_regular_file()) {
            return true;
        }
    }
    return false;
}

// What is old goes while the cache is open, or with global collection also when it is closed.
void RunFiles(const std::string& root) {
    RunRounds(FileCacheConfig(kTensorBytes, kCapacity, kLayers, 4, 2, root, LOCAL, 60, 60, false, 60, 60), 0);
    VINEYARD_ASSERT(HasFiles(root));
    RunRounds(FileCacheConfig(kTensorBytes, kCapacity, kLayers, 4, 2, root, LOCAL, 60, 60, true, 1, 1), 0);
    for (int turn = 0; turn < 600 && HasFiles(root); turn++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    VINEYARD_ASSERT(!HasFiles(root));
}

}  // namespace

int main(int count, char** arguments) {
    try {
        if (count == 3 && std::strcmp(arguments[1], "--root") == 0) {
            RunFiles(arguments[2]);
        } else if (count >= 5 && std::strcmp(arguments[1], "--client-num") == 0) {
            std::vector<std::string> sockets(arguments + 4, arguments + count);
            sockets.resize(std::min<std::size_t>(sockets.size(), static_cast<std::size_t>(std::atoi(arguments[2]))));
            RunShared(sockets);
        } else {
            LOG(INFO) << "usage: vineyard_rounds --client-num N --vineyard-ipc-sockets SOCKET... | --root FOLDER";
            return 2;
        }
    } catch (const std::exception& error) {
        LOG(ERROR) << error.what();
        return 1;
    }
    LOG(INFO) << "Passed.";
    return 0;
}
