//! The program `frit-run`.

use std::process::ExitCode;

fn main() -> ExitCode {
    frit_runtime::end(frit_runtime::program::main(std::env::args_os()))
}
