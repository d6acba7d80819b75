//! The certificate: a proof, pass by pass, that a compilation kept what a training step computes.

mod algebra;
mod compare;
mod definition;
mod explain;
pub mod gradient;
mod index;
mod lemmas;
mod reading;
mod substitute;
mod term;

pub use compare::{Difference, compare, compare_distributed};
pub use reading::Ranks;
