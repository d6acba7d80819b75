//! The text form of graphs: printed, parsed, and the same again.
//!
//! One node per line: results with types, operation, operands, attributes in braces, region after `@`
//! (forward is left out), origin in `loc(source, scope, pass)`. A fusion's body follows in braces.

mod parse;
mod print;
#[cfg(test)]
mod tests;

pub use parse::{ParseError, parse};
pub(crate) use print::print;
