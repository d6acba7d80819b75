// Modules in ELF files: code of this processor is run; code for NVIDIA's GPUs is looked through for its kernels
// and their parameters.
#include "module.h"
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

namespace device {
namespace {
const u16 MACHINE_CUDA = 190;
// Attributes of a kernel in its section `.nv.info.NAME`.
const u8 SIZED = 4, MOST_THREADS = 0x05, PARAMETER = 0x17;

const Elf64_Ehdr& header(const u8* image) { return *reinterpret_cast<const Elf64_Ehdr*>(image); }

Code load_host(const u8* image, Module& module, std::string& log) {
    size_t bytes = header(image).e_shoff + size_t(header(image).e_shnum) * header(image).e_shentsize;
    const char* folder = getenv("TMPDIR");
    std::string path = std::string(folder ? folder : "/tmp") + "/frit-module-XXXXXX";
    int file = mkstemp(path.data());
    bool written = file >= 0 && write(file, image, bytes) == ssize_t(bytes);
    if (file >= 0) close(file);
    void* library = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path.c_str());
    if (!library) {
        const char* error = dlerror();
        log = error ? error : "cannot be written";
        return INVALID_IMAGE;
    }
    auto names = reinterpret_cast<const char* (*)()>(dlsym(library, "frit_kernels"));
    if (!names) return INVALID_IMAGE;
    std::string all = names();
    for (size_t begin = 0; begin < all.size();) {
        size_t end = all.find(' ', begin);
        std::string name = all.substr(begin, end - begin);
        begin = end + 1;
        typedef void (*Run)(const u32*, u32, u32, int, void**);
        auto run = reinterpret_cast<Run>(dlsym(library, ("launch_" + name).c_str()));
        auto sizes = reinterpret_cast<u32 (*)(u32*)>(dlsym(library, ("parameters_" + name).c_str()));
        if (!run || !sizes) return INVALID_IMAGE;
        auto kernel = std::make_unique<Kernel>();
        kernel->name = name;
        kernel->parameters.resize(64);
        kernel->parameters.resize(sizes(kernel->parameters.data()));
        kernel->run = [run](const Launch& l, void** parameters) {
            run(l.grid, l.block[0], l.shared, int(random() % 2), parameters);
        };
        module.kernels[name] = std::move(kernel);
    }
    return SUCCESS;
}

void read_info(const u8* info, size_t bytes, Kernel& kernel) {
    for (size_t at = 0; at + 4 <= bytes;) {
        u16 size = 0;
        memcpy(&size, info + at + 2, 2);
        bool is_sized = info[at] == SIZED;
        if (is_sized && info[at + 1] == PARAMETER && size >= 12) {
            u16 ordinal;
            u32 packed;
            memcpy(&ordinal, info + at + 4 + 4, 2);
            memcpy(&packed, info + at + 4 + 8, 4);
            if (kernel.parameters.size() <= ordinal) kernel.parameters.resize(ordinal + 1u);
            kernel.parameters[ordinal] = packed >> 18;
        }
        if (is_sized && info[at + 1] == MOST_THREADS && size >= 4) memcpy(&kernel.most_threads, info + at + 4, 4);
        at += 4u + (is_sized ? size : 0u);
    }
}

Code load_cuda(const u8* image, Module& module) {
    const Elf64_Ehdr& head = header(image);
    auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + head.e_shoff);
    auto* names = reinterpret_cast<const char*>(image + sections[head.e_shstrndx].sh_offset);
    for (u32 i = 0; i < head.e_shnum; i++) {
        std::string name = names + sections[i].sh_name;
        if (name.rfind(".nv.info.", 0) != 0) continue;
        auto kernel = std::make_unique<Kernel>();
        kernel->name = name.substr(9);
        read_info(image + sections[i].sh_offset, sections[i].sh_size, *kernel);
        for (u32 j = 0; j < head.e_shnum; j++) {
            std::string other = names + sections[j].sh_name;
            if (other == ".nv.shared." + kernel->name) kernel->static_shared = u32(sections[j].sh_size);
            if (other == ".text." + kernel->name) kernel->registers = sections[j].sh_info >> 24;
        }
        module.kernels[kernel->name] = std::move(kernel);
    }
    return module.kernels.empty() ? INVALID_IMAGE : SUCCESS;
}
} // namespace

Code load_elf(const void* image, Module& module, std::string& log) {
    auto* bytes = static_cast<const u8*>(image);
    switch (header(bytes).e_machine) {
    case MACHINE_CUDA: return load_cuda(bytes, module);
    case EM_X86_64:
    case EM_AARCH64: return load_host(bytes, module, log);
    default: return NO_BINARY;
    }
}

} // namespace device
