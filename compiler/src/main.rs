//! The program `frit`.

use std::process::ExitCode;

/// Compiling makes and frees millions of small values; that of the C library takes a quarter of the time for it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    ExitCode::from(frit::commands::main(std::env::args_os()))
}
