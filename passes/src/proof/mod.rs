//! Proofs of the rewrite rules: what `rule.rs` describes.
//!
//! A rule is applied to each instance of its left sides, and Z3 is asked for an index at which the result differs. The statement that is
//! proved is thus that of the code. It is for all sizes: the result at other sizes must be the same but for these, and
//! at small sizes, where axes may have one element, both sides are interpreted and compared.

mod broken;
mod elements;
mod encode;
mod pattern;
mod reductions;
mod rules;
mod tests;

use easy_smt::{Context, ContextBuilder};
use frit_tests::requirements::Requirement;
use std::path::{Path, PathBuf};

/// No query takes longer: one without an answer is a failure of its rule.
const TIMEOUT_MS: u64 = 60_000;

/// Z3.
struct Solver {
    program: PathBuf,
    process: Context,
    /// Whether this process was asked about bit-vectors.
    asked_bits: bool,
}

impl Solver {
    /// The solver, or nothing if it is lacking and may be.
    fn find() -> Option<Self> {
        let program = Requirement::Z3.find()?;
        let process = start(&program);
        Some(Solver { program, process, asked_bits: false })
    }

    /// A new process: the solver is fast at bit-vectors only in what it is asked first.
    fn restart(&mut self, bits: bool) {
        self.process = start(&self.program);
        self.asked_bits = bits;
    }
}

fn start(program: &Path) -> Context {
    let mut process = ContextBuilder::new()
        .solver(program)
        .solver_args(["-smt2", "-in"])
        .build()
        .expect("the solver starts");
    let limit = process.numeral(TIMEOUT_MS);
    process.set_option(":timeout", limit).expect("the solver takes a limit");
    process
}
