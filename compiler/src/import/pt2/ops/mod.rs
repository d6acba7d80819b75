//! How ATen operators are rewritten, one file per family, and the table of all of them.

mod attention;
mod convolution;
mod creation;
mod diagonal;
mod distance;
mod index;
mod join;
mod layout;
mod loss;
mod matrix;
mod normalization;
mod pointwise;
mod pooling;
mod random;
mod reduction;
mod resize;
mod shuffle;
mod special;

use super::call::{Call, Outcome};
pub(super) use pointwise::{detach_node, detached};

/// Rewrites a call.
pub(super) type Convert = fn(&mut Call<'_>) -> Outcome;

/// Stands before the name of a statistic where its renewed value is meant.
pub(super) const RENEWED: &str = "\0renewed\0";

const FAMILIES: &[&[(&str, Convert)]] = &[
    attention::OPERATORS,
    convolution::OPERATORS,
    creation::OPERATORS,
    diagonal::OPERATORS,
    distance::OPERATORS,
    index::OPERATORS,
    join::OPERATORS,
    layout::OPERATORS,
    loss::OPERATORS,
    matrix::OPERATORS,
    normalization::OPERATORS,
    pointwise::OPERATORS,
    pooling::OPERATORS,
    random::OPERATORS,
    reduction::OPERATORS,
    resize::OPERATORS,
    shuffle::OPERATORS,
    special::OPERATORS,
];

/// How the operator of this name, without its overload, is rewritten.
pub(super) fn find(op: &str) -> Option<Convert> {
    FAMILIES
        .iter()
        .flat_map(|f| f.iter())
        .find(|(name, _)| *name == op)
        .map(|(_, convert)| *convert)
}

/// Names of the operators that are read, sorted.
pub(super) fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> =
        FAMILIES.iter().flat_map(|f| f.iter()).map(|(name, _)| *name).collect();
    names.sort_unstable();
    names
}

fn one(name: String) -> Outcome {
    Ok(vec![name])
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_operator_is_listed_twice() {
        let names = super::names();
        let twice: Vec<_> = names.windows(2).filter(|w| w[0] == w[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
}
