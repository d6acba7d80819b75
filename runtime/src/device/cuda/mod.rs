//! NVIDIA GPUs.

pub mod recipe;
