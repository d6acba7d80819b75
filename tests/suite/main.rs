//! Tests that cross crates, in one binary so that LLVM is linked once.

mod assembly;
mod broken_plans;
mod checkpoints;
mod cli;
mod cuda;
mod dropout;
mod export;
mod language;
mod losses;
mod machine;
mod mesh;
mod mutants;
mod optimizers;
mod oracle;
mod parity;
mod plans;
mod precision;
mod recipes;
mod stages;
mod strategies;
mod support;
mod tidy;
mod trace;
mod training;
mod vision;
