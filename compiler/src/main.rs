//! The program `frit`.

use clap::Parser;
use frit::commands::{Cli, execute};
use frit::render;
use std::io::Write;
use std::process::ExitCode;

/// Compiling makes and frees millions of small values; that of the C library takes a quarter of the time for it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// 0 if all went well, 1 if a run failed, 2 if something must be changed.
fn main() -> ExitCode {
    let cli = Cli::parse();
    match execute(&cli) {
        Ok(text) => {
            // A reader may close the pipe early.
            let _ = anstream::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(report) => {
            render::print(&report.diagnostics);
            ExitCode::from(report.exit_code())
        }
    }
}
