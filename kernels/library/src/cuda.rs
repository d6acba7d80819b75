//! Sources of the CUDA kernels for NVRTC: one per file `cuda/*.cu`. The head of a file lists the macros it requires (element types, tile
//! sizes).

/// Names of the files in `cuda/`, without `.cu`, and what to compile for them: instructions, element types, and the file with what it
/// includes.
pub const SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// What to compile for a file.
pub fn source(file: &str) -> Option<&'static str> {
    SOURCES.iter().find(|(name, _)| *name == file).map(|(_, source)| *source)
}

/// The part of every source that names instructions, which an emulation replaces.
pub const INSTRUCTIONS: &str = include_str!("../cuda/ptx.cuh");
