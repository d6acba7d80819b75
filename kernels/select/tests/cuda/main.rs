//! Launches against the interpreter: their CUDA C++ is compiled for the CPU, with threads as fibers.

mod adafactor;
mod attention;
mod batch_norm_last;
mod check;
mod convert;
mod dropout;
mod embedding;
mod emulator;
mod epilogue;
mod gemms;
mod images_last;
mod index;
mod layout;
mod matmul;
mod memory;
mod nvrtc;
mod operations;
mod order;
mod quantize;
mod reduce;
mod results;
mod window;
