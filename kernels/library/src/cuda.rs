//! Sources of the CUDA kernels for NVRTC: one self-contained file per family. The head of a file lists the macros it requires (element
//! types, tile sizes).

macro_rules! sources {
    ($($name:literal $(with $($shared:literal)+)?),* $(,)?) => {
        /// Names of the files in `cuda/`, without `.cu`, and what to compile for them.
        pub const SOURCES: &[(&str, &str)] = &[$((
            $name,
            concat!(
                include_str!("../cuda/ptx.cuh"),
                "#line 1 \"numbers.cuh\"\n",
                include_str!("../cuda/numbers.cuh"),
                $($(
                    "#line 1 \"", $shared, ".cuh\"\n",
                    include_str!(concat!("../cuda/", $shared, ".cuh")),
                )+)?
                "#line 1 \"", $name, ".cu\"\n",
                include_str!(concat!("../cuda/", $name, ".cu")),
            ),
        )),*];
    };
}

sources![
    "adafactor" with "block_sum",
    "attention" with "tensor_cores" "sight" "attention",
    "attention_delta",
    "attention_grad_keys" with "tensor_cores" "sight" "attention",
    "attention_grad_queries" with "tensor_cores" "sight" "attention",
    "attention_mask_grad" with "sight" "attention_plain",
    "attention_plain" with "sight" "attention_plain",
    "attention_plain_grad" with "sight" "attention_plain",
    "batch_norm" with "block_sum",
    "bias",
    "conv" with "window",
    "conv_tiles" with "window" "tensor_cores",
    "convert",
    "copy",
    "cum_sum",
    "embedding",
    "embedding_grad",
    "fill",
    "gather",
    "gelu",
    "grad_stats",
    "pool" with "window",
    "quantize",
    "random",
    "reduce",
    "scatter",
    "sort",
    "top_k",
];

/// What to compile for a file.
pub fn source(file: &str) -> Option<&'static str> {
    SOURCES.iter().find(|(name, _)| *name == file).map(|(_, source)| *source)
}

/// The part of every source that names instructions, which an emulation replaces.
pub const INSTRUCTIONS: &str = include_str!("../cuda/ptx.cuh");
