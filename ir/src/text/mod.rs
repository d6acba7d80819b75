//! The text form of graphs. Parsing the printed text gives the same graph.
//!
//! One node per line: results with types, operation, operands, attributes in braces, region after `@` (omitted
//! for forward), and origin in `loc(source, scope, pass)`. The body of a fusion follows in braces.

mod parse;
mod print;
#[cfg(test)]
mod tests;

pub use parse::{ParseError, parse};
pub(crate) use print::print;
