// Code that was loaded, and its kernels.
#pragma once
#include "device.h"
#include <map>
#include <optional>

namespace device {

struct Launch { u32 grid[3], block[3], shared; };

struct Kernel {
    std::string name;
    // Sizes of the parameters, in bytes.
    std::vector<u32> parameters;
    u32 static_shared = 0;
    // What an attribute allows; without it static and dynamic memory are 48 KiB at most.
    std::optional<u32> allowed_shared;
    u32 most_threads = 1024;
    // Of each thread; 0 if unknown.
    u32 registers = 0;
    u32 most_dynamic_shared() const { return allowed_shared.value_or((48u << 10) - static_shared); }
    // Runs it on copies of the parameters.
    std::function<void(const Launch&, void** parameters)> run;
};

struct Module { std::map<std::string, std::unique_ptr<Kernel>> kernels; };

// PTX as code generation writes it, interpreted; `log` says what is not understood.
Code load_ptx(const char* text, Module& module, std::string& log);
// What the stand-in of NVRTC compiled for this processor, or what NVIDIA's compilers made, which is not run.
Code load_elf(const void* image, Module& module, std::string& log);

} // namespace device
