//! The program `frit-run`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(frit_runtime::program::main(std::env::args_os()))
}
