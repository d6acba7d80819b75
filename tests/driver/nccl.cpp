// A stand-in of NCCL: ranks are processes of one machine and exchange files. A communicator that does not block the host
// answers that a call is in progress, and another thread puts the collective on its stream, later; until that was done
// nothing else may be asked of it but what became of it. Collectives of a communicator that neither a stream nor an event
// orders are a violation; NCCL orders them unless NCCL_GRAPH_MIXING_SUPPORT=0. After a violation the communicator has failed,
// and says so.
//
//   NCCL_COMM_BLOCKING  1 for communicators that block, whatever their configuration says
//   FRIT_NCCL_REFUSES   `config` if no communicator can be configured
//   FRIT_NCCL_LATE      milliseconds by which every rank but the first is done later with each collective
#include "number.h"
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#define PUBLIC extern "C" __attribute__((visibility("default")))
extern "C" void frit_device_put_in_turn(void* stream, void** turn, bool (*work)(void*), void* data);
extern "C" bool frit_device_has(const void* at, size_t bytes);
extern "C" void frit_device_violate(const char* rule);
extern "C" bool frit_device_has_graphs();
extern "C" void frit_device_count(const char* what);

namespace {
enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum Type { U8 = 1, I32 = 2, I64 = 4, F16 = 6, F32 = 7, F64 = 8, BF16 = 9 };
enum Operation { SUM = 0, MAX = 2, AVERAGE = 4 };

typedef std::chrono::steady_clock Clock;
struct Collective;

struct Communicator {
    // The folder of its files.
    std::string folder;
    int ranks, rank;
    bool blocking;
    u64 done = 0, splits = 0;
    std::atomic<bool> aborted = false;
    // Until these files are there it is in progress.
    std::vector<std::string> awaited = {};
    // A communicator that is made of it.
    Communicator** split_to = nullptr;
    int split_color = 0;
    void* turn = nullptr;
    // Whether the other thread has not put a collective on its stream yet.
    std::atomic<bool> launching = false;
    // What has started and is not done, and when it could have been.
    const Collective* current = nullptr;
    Clock::time_point arrived = {};
    // Why nothing can be done any more, once that is so.
    std::string failure = "";
    std::atomic<bool> failed = false;
};

bool is_there(const std::string& path) { return access(path.c_str(), F_OK) == 0; }
// Nothing of it is done any more; what waits for it waits until it is aborted.
void fail(Communicator& all, const std::string& why) {
    all.failure = "rank " + std::to_string(all.rank) + " of " + all.folder + ": " + why;
    all.failed = true;
    frit_device_violate(all.failure.c_str());
}
bool content(Communicator& all, const std::string& path, std::string& bytes) {
    std::ifstream file(path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
    if (!file.is_open()) fail(all, path + " cannot be read: " + strerror(errno));
    return !all.failed;
}
// Whole, or not there.
bool publish(Communicator& all, const std::string& path, const std::string& bytes) {
    std::string aside = path + ".part";
    std::ofstream file(aside, std::ios::binary);
    file << bytes;
    file.close();
    if (!file || rename(aside.c_str(), path.c_str()) != 0) fail(all, path + " cannot be written: " + strerror(errno));
    return !all.failed;
}

size_t size_of(int type) {
    switch (type) {
    case U8: return 1;
    case F16: case BF16: return 2;
    case I32: case F32: return 4;
    case I64: case F64: return 8;
    default: return 0;
    }
}
double load(const char* at, int type) {
    switch (type) {
    case U8: return read<u8>(at);
    case I32: return read<int32_t>(at);
    case I64: return double(read<int64_t>(at));
    case F16: return load_f16(at);
    case F32: return read<float>(at);
    case F64: return read<double>(at);
    default: return load_bf16(at);
    }
}
void store(char* at, int type, double x) {
    switch (type) {
    case U8: return write(at, u8(x));
    case I32: return write(at, int32_t(x));
    case I64: return write(at, int64_t(x));
    case F16: return store_f16(at, x);
    case F32: return write(at, float(x));
    case F64: return write(at, x);
    default: return store_bf16(at, x);
    }
}

// To or from another rank, within a group.
struct Message {
    bool sent;
    char* at;
    size_t bytes;
    int type, peer;
    Communicator* all;
    void* stream;
};
thread_local int groups = 0;
thread_local std::vector<Message> messages;

struct Collective {
    Communicator* all;
    std::string kind;
    const char* send;
    char* receive;
    // Elements that are sent; of these every rank receives all, or its part.
    size_t count;
    int type, operation;
    // Of a group.
    std::vector<Message> messages = {};
    std::string head() const {
        return kind + " of " + std::to_string(count) + " elements, type " + std::to_string(type) + ", operation " + std::to_string(operation);
    }
};

// What a rank sends to the others: for each of them the length, and the bytes.
std::string sent(const Collective& c) {
    std::string all;
    for (int r = 0; r < c.all->ranks; r++) {
        std::string bytes;
        for (const Message& m : c.messages)
            if (m.sent && m.peer == r) bytes.append(m.at, m.bytes);
        u64 length = bytes.size();
        all.append(reinterpret_cast<const char*>(&length), sizeof length).append(bytes);
    }
    return all;
}
// Takes what the ranks sent to this one.
void receive(const Collective& c, const std::vector<std::string>& parts) {
    for (int r = 0; r < c.all->ranks; r++) {
        const char* at = parts[size_t(r)].data();
        for (int to = 0; to < c.all->rank; to++) at += sizeof(u64) + read<u64>(at);
        u64 length = read<u64>(at), taken = 0;
        at += sizeof(u64);
        for (const Message& m : c.messages) {
            if (m.sent || m.peer != r) continue;
            if (taken + m.bytes <= length) memcpy(m.at, at + taken, m.bytes);
            taken += m.bytes;
        }
        if (taken != length) frit_device_violate("a rank receives another number of bytes than it is sent");
    }
}

// Each time it is launched; with the number of the launch the ranks find each other.
bool run(void* data) {
    Collective& c = *static_cast<Collective*>(data);
    Communicator& all = *c.all;
    if (all.aborted) return true;
    if (all.failed) return false;
    auto path = [&](int rank) { return all.folder + "/" + std::to_string(all.done) + "-" + std::to_string(rank); };
    size_t width = size_of(c.type);
    if (!all.current) {
        std::string bytes = c.kind == "group" ? sent(c) : std::string(c.send, c.count * width);
        if (!publish(all, path(all.rank), c.head() + "\n" + bytes)) return false;
        all.current = &c;
    }
    if (all.current != &c) {
        fail(all, "`" + c.head() + "` starts while collective " + std::to_string(all.done) + ", `" + all.current->head() + "`, is not done");
        return false;
    }
    for (int r = 0; r < all.ranks; r++)
        if (!is_there(path(r))) return false;
    static const char* late = getenv("FRIT_NCCL_LATE");
    if (late && all.rank > 0) {
        if (all.arrived == Clock::time_point()) all.arrived = Clock::now();
        if (Clock::now() - all.arrived < std::chrono::milliseconds(atoi(late))) return false;
    }
    std::vector<std::string> parts(size_t(all.ranks));
    for (int r = 0; r < all.ranks; r++) {
        std::string& part = parts[size_t(r)];
        if (!content(all, path(r), part)) return false;
        std::string head = part.substr(0, part.find('\n'));
        if (head != c.head()) {
            fail(all, "ranks start different collectives: number " + std::to_string(all.done) + " is `" + c.head() + "`, and of rank " +
                          std::to_string(r) + " `" + head + "`");
            return false;
        }
        part.erase(0, head.size() + 1);
    }
    if (c.kind == "group") {
        receive(c, parts);
    } else if (c.kind == "all_gather") {
        for (int r = 0; r < all.ranks; r++) memcpy(c.receive + size_t(r) * c.count * width, parts[size_t(r)].data(), c.count * width);
    } else {
        bool scatter = c.kind == "reduce_scatter";
        size_t n = scatter ? c.count / size_t(all.ranks) : c.count, begin = scatter ? n * size_t(all.rank) : 0;
        for (size_t i = 0; i < n; i++) {
            double x = load(parts[0].data() + (begin + i) * width, c.type);
            for (size_t r = 1; r < parts.size(); r++) {
                double y = load(parts[r].data() + (begin + i) * width, c.type);
                x = c.operation != MAX ? x + y : y > x || y != y ? y : x;
            }
            store(c.receive + i * width, c.type, c.operation == AVERAGE ? x / all.ranks : x);
        }
    }
    // All have read what came before.
    if (all.done > 0) unlink((all.folder + "/" + std::to_string(all.done - 1) + "-" + std::to_string(all.rank)).c_str());
    all.done++;
    all.current = nullptr;
    all.arrived = {};
    return true;
}

// Nothing may be asked of a communicator while something is in progress.
bool is_ready(const Communicator* all) {
    bool ready = all->awaited.empty() && !all->launching;
    if (all->failed) return false;
    if (!ready) frit_device_violate("a call of NCCL while another is in progress");
    return ready;
}

int launch(Collective* collective, void* stream) {
    Communicator* all = collective->all;
    frit_device_count(("nccl " + collective->kind).c_str());
    if (all->blocking) {
        frit_device_count("nccl launch by the caller");
        frit_device_put_in_turn(stream, &all->turn, run, collective);
        return SUCCESS;
    }
    all->launching = true;
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        frit_device_count("nccl launch by another thread");
        frit_device_put_in_turn(stream, &all->turn, run, collective);
        all->launching = false;
    }).detach();
    return IN_PROGRESS;
}

int put(const char* kind, const void* send, void* receive, size_t count, size_t received, int type, int operation, Communicator* all, void* stream) {
    size_t width = size_of(type);
    if (!is_ready(all)) return INVALID_USAGE;
    if (width == 0 || !frit_device_has(send, count * width) || !frit_device_has(receive, received * width)) {
        frit_device_violate("a collective outside of an allocation");
        return INVALID_ARGUMENT;
    }
    auto* collective = new Collective{all, kind, static_cast<const char*>(send), static_cast<char*>(receive), count, type, operation};
    return launch(collective, stream);
}

// Of a group that is open; all of it is of one communicator and one stream.
int put_message(bool sent, const void* at, size_t count, int type, int peer, Communicator* all, void* stream) {
    size_t bytes = count * size_of(type);
    if (groups == 0) frit_device_violate("a message outside of a group");
    if (groups == 0 || !is_ready(all)) return INVALID_USAGE;
    if (bytes == 0 || peer < 0 || peer >= all->ranks || !frit_device_has(at, bytes)) {
        frit_device_violate("a message of nothing, to no rank, or outside of an allocation");
        return INVALID_ARGUMENT;
    }
    messages.push_back(Message{sent, static_cast<char*>(const_cast<void*>(at)), bytes, type, peer, all, stream});
    return SUCCESS;
}

// Takes the members of this rank's color, in the order of ranks.
void finish_split(Communicator& parent) {
    std::string stem = parent.folder + "/split-" + std::to_string(parent.splits) + "-";
    int ranks = 0, rank = 0;
    for (int r = 0; r < parent.ranks; r++) {
        std::string color;
        if (!content(parent, stem + std::to_string(r), color)) return;
        if (atoi(color.c_str()) != parent.split_color) continue;
        if (r == parent.rank) rank = ranks;
        ranks++;
    }
    std::string folder = stem + "color-" + std::to_string(parent.split_color);
    // Another member may have been first.
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return fail(parent, folder + " cannot be made: " + strerror(errno));
    *parent.split_to = new Communicator{folder, ranks, rank, parent.blocking};
    parent.split_to = nullptr;
    parent.splits++;
}
} // namespace

PUBLIC int ncclGetVersion(int* version) { *version = 21800; return SUCCESS; }
PUBLIC const char* ncclGetErrorString(int code) { return code == SUCCESS ? "no error" : code == IN_PROGRESS ? "NCCL operation in progress" : "invalid usage"; }
PUBLIC const char* ncclGetLastError(Communicator* all) { return all && all->failed ? all->failure.c_str() : ""; }
struct Identity { char bytes[128]; };
PUBLIC int ncclGetUniqueId(Identity* id) {
    const char* folder = getenv("TMPDIR");
    snprintf(id->bytes, sizeof id->bytes, "%s/frit-nccl-XXXXXX", folder ? folder : "/tmp");
    return mkdtemp(id->bytes) ? SUCCESS : INVALID_USAGE;
}
struct Config { size_t size; u32 magic, version; int blocking; };
static bool is(const char* variable, const char* value) {
    const char* found = getenv(variable);
    return found && std::string(found) == value;
}
static int join(Communicator** made, int ranks, const Identity& id, int rank, bool blocking);
PUBLIC int ncclCommInitRankConfig(Communicator** made, int ranks, Identity id, int rank, const Config* config) {
    bool is_known = config->size >= sizeof(Config) && config->magic == 0xcafebeef && config->version == 21400 && config->blocking == 0;
    if (!is_known || is("FRIT_NCCL_REFUSES", "config")) return INVALID_ARGUMENT;
    return join(made, ranks, id, rank, is("NCCL_COMM_BLOCKING", "1"));
}
PUBLIC int ncclCommInitRank(Communicator** made, int ranks, Identity id, int rank) { return join(made, ranks, id, rank, true); }
PUBLIC int ncclCommGetAsyncError(Communicator* all, int* state) {
    if (!all) return INVALID_ARGUMENT;
    while (!all->awaited.empty() && is_there(all->awaited.back())) all->awaited.pop_back();
    bool is_done = all->awaited.empty() && !all->launching;
    if (is_done && all->split_to && !all->failed) finish_split(*all);
    *state = all->failed ? INVALID_USAGE : is_done ? SUCCESS : IN_PROGRESS;
    return SUCCESS;
}
// What was asked of a communicator: in progress, or, if it blocks, done.
static int asked(Communicator* all) {
    int state = IN_PROGRESS;
    while (all->blocking && ncclCommGetAsyncError(all, &state) == SUCCESS && state == IN_PROGRESS)
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    return state;
}
static int join(Communicator** made, int ranks, const Identity& id, int rank, bool blocking) {
    if (rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    auto* all = new Communicator{id.bytes, ranks, rank, blocking};
    publish(*all, all->folder + "/joined-" + std::to_string(rank), "");
    for (int r = 0; r < ranks; r++) all->awaited.push_back(all->folder + "/joined-" + std::to_string(r));
    *made = all;
    return asked(all);
}
// Exit handlers of the library, and of the driver, may wait for the GPU.
static struct Exit {
    std::atomic<bool> is_safe = true;
    ~Exit() { if (!is_safe) frit_device_violate("exit handlers after ncclCommAbort"); }
} at_exit;
PUBLIC int ncclCommAbort(Communicator* all) {
    at_exit.is_safe = false;
    // What runs ends; then the library waits until no graph holds its collectives, however long that takes.
    all->aborted = true;
    int polls = 0;
    for (; frit_device_has_graphs() && polls < 5000; polls++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (polls == 5000) frit_device_violate("ncclCommAbort of graphs that are not destroyed");
    return all->blocking ? SUCCESS : IN_PROGRESS;
}
PUBLIC int ncclCommSplit(Communicator* all, int color, int key, Communicator** made, const Config* config) {
    if (key != 0 || config || color < 0 || !is_ready(all)) return INVALID_ARGUMENT;
    std::string stem = all->folder + "/split-" + std::to_string(all->splits) + "-";
    publish(*all, stem + std::to_string(all->rank), std::to_string(color));
    for (int r = 0; r < all->ranks; r++) all->awaited.push_back(stem + std::to_string(r));
    all->split_to = made;
    all->split_color = color;
    return asked(all);
}
PUBLIC int ncclAllGather(const void* send, void* receive, size_t count, int type, Communicator* all, void* stream) {
    return put("all_gather", send, receive, count, count * size_t(all->ranks), type, SUM, all, stream);
}
PUBLIC int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int operation, Communicator* all, void* stream) {
    return put("reduce_scatter", send, receive, count * size_t(all->ranks), count, type, operation, all, stream);
}
PUBLIC int ncclAllReduce(const void* send, void* receive, size_t count, int type, int operation, Communicator* all, void* stream) {
    return put("all_reduce", send, receive, count, count, type, operation, all, stream);
}
PUBLIC int ncclSend(const void* send, size_t count, int type, int peer, Communicator* all, void* stream) {
    return put_message(true, send, count, type, peer, all, stream);
}
PUBLIC int ncclRecv(void* receive, size_t count, int type, int peer, Communicator* all, void* stream) {
    return put_message(false, receive, count, type, peer, all, stream);
}
PUBLIC int ncclGroupStart() {
    groups++;
    return SUCCESS;
}
PUBLIC int ncclGroupEnd() {
    if (groups == 0) return INVALID_USAGE;
    if (--groups > 0 || messages.empty()) return SUCCESS;
    std::vector<Message> all;
    all.swap(messages);
    const Message& first = all[0];
    for (const Message& m : all) {
        if (m.all == first.all && m.stream == first.stream && m.type == first.type) continue;
        frit_device_violate("a group of several communicators, streams or types");
        return INVALID_USAGE;
    }
    return launch(new Collective{first.all, "group", nullptr, nullptr, 0, first.type, SUM, all}, first.stream);
}
