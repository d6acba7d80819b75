// A stand-in of NVRTC: CUDA C++ is compiled for this processor, with the emulation that the tests of launches use.
//
//   FRIT_DEVICE_FOLDER  the folder with the emulation's `cuda.h`, its scheduler `fibers.o`, and `ptx.cuh`, the
//                       part of every source that the emulation replaces
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

namespace {
enum { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };
struct Program { std::string source, name, log, code; };

std::string folder() {
    const char* path = getenv("FRIT_DEVICE_FOLDER");
    return path ? path : ".";
}

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream all;
    all << file.rdbuf();
    return all.str();
}

// The source with the emulated instructions, and for each kernel its launcher and the sizes of its parameters.
std::string on_host(const std::string& source) {
    std::string instructions = read(folder() + "/ptx.cuh");
    std::string kernels = source.rfind(instructions, 0) == 0 ? source.substr(instructions.size()) : source;
    std::string all = "#include \"cuda.h\"\n" + kernels + R"(
template <class... A> u32 parameter_sizes(void (*)(A...), u32* sizes) {
    ((*sizes++ = u32(sizeof(A))), ...);
    return u32(sizeof...(A));
}
)";
    std::string names;
    const std::string head = "extern \"C\" __global__ void";
    for (size_t at = kernels.find(head); at != std::string::npos; at = kernels.find(head, at + 1)) {
        size_t begin = at + head.size();
        size_t bounds = kernels.find("__launch_bounds__", begin);
        if (bounds != std::string::npos && bounds < kernels.find_first_not_of(" \n", begin) + 1) begin = kernels.find(')', bounds) + 1;
        begin = kernels.find_first_not_of(" \n", begin);
        std::string name = kernels.substr(begin, kernels.find('(', begin) - begin);
        all += "extern \"C\" EXPORTED void launch_" + name + "(const u32* grid, u32 block, u32 shared, int reversed, void** arguments) { "
               "host::launch(" + name + ", grid, block, shared, reversed != 0, arguments); }\n"
               "extern \"C\" EXPORTED u32 parameters_" + name + "(u32* sizes) { return parameter_sizes(" + name + ", sizes); }\n";
        names += name + " ";
    }
    return all + "extern \"C\" EXPORTED const char* frit_kernels() { return \"" + names + "\"; }\n";
}

bool run(const std::vector<std::string>& words, std::string& said, const std::string& log) {
    pid_t child = fork();
    if (child == 0) {
        if (!freopen(log.c_str(), "w", stderr)) _exit(127);
        std::vector<char*> arguments;
        for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
        arguments.push_back(nullptr);
        execvp(arguments[0], arguments.data());
        _exit(127);
    }
    int status = 0;
    bool done = child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    said = read(log);
    return done;
}
} // namespace

API nvrtcVersion(int* major, int* minor) { *major = 12, *minor = 0; return SUCCESS; }
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int code) {
    return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : code == INVALID_OPTION ? "NVRTC_ERROR_INVALID_OPTION" : "NVRTC_ERROR";
}
API nvrtcCreateProgram(Program** made, const char* source, const char* name, int headers, const char* const*, const char* const*) {
    if (!source || headers != 0) return INVALID_INPUT;
    *made = new Program{source, name ? name : "default_program", "", ""};
    return SUCCESS;
}
API nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return SUCCESS;
}
API nvrtcCompileProgram(Program* program, int n, const char* const* options) {
    const char* scratch = getenv("TMPDIR");
    std::string dir = std::string(scratch ? scratch : "/tmp") + "/frit-nvrtc-XXXXXX";
    if (!mkdtemp(dir.data())) return COMPILATION;
    std::string from = dir + "/source.cpp", to = dir + "/source.so", log = dir + "/log";
    const char* compiler = getenv("CXX");
    std::vector<std::string> words = {compiler ? compiler : "c++", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-w",
                                      "-U_FORTIFY_SOURCE", "-I", folder(), "-o", to};
    bool has_architecture = false;
    for (int i = 0; i < n; i++) {
        std::string option = options[i];
        if (option.rfind("--gpu-architecture=sm_", 0) == 0) has_architecture = true;
        else if (option == "--std=c++17") words.push_back("-std=c++17");
        else if (option.rfind("-D", 0) == 0) words.push_back(option);
        else return INVALID_OPTION;
    }
    std::ofstream(from) << on_host(program->source);
    words.insert(words.end(), {from, folder() + "/fibers.o"});
    bool done = has_architecture && run(words, program->log, log);
    program->code = done ? read(to) : "";
    for (const std::string& path : {from, to, log}) unlink(path.c_str());
    rmdir(dir.c_str());
    return done ? SUCCESS : COMPILATION;
}
API nvrtcGetProgramLogSize(Program* program, size_t* size) { *size = program->log.size() + 1; return SUCCESS; }
API nvrtcGetProgramLog(Program* program, char* log) { memcpy(log, program->log.c_str(), program->log.size() + 1); return SUCCESS; }
API nvrtcGetCUBINSize(Program* program, size_t* size) { *size = program->code.size(); return *size ? SUCCESS : INVALID_PROGRAM; }
API nvrtcGetCUBIN(Program* program, char* code) { memcpy(code, program->code.data(), program->code.size()); return SUCCESS; }
