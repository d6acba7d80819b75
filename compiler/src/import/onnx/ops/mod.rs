//! Converters of ONNX operators, one file per family, and the table of all of them.

mod attention;
mod batch_norm;
mod composed;
mod constant;
mod convolution;
mod cumulative;
mod determinant;
mod einsum;
mod finite;
mod fourier;
mod function;
mod grid;
mod index;
mod layout;
mod loss;
mod matrix;
mod normalization;
mod order;
mod patches;
mod pointwise;
mod pooling;
mod random;
mod rearrange;
mod recurrent;
mod reduction;
mod resize;
mod sampling;
mod scatter;
mod sequence;
mod signal;
mod state;

use super::context::{NodeContext, Outcome};
use super::{function as functions, selection};

/// How one ONNX operator is read.
#[derive(Clone, Copy)]
pub(super) struct Operator {
    /// ONNX's name, in the default domain.
    pub(super) name: &'static str,
    /// The attributes that are understood; others are refused.
    pub(super) attributes: &'static [&'static str],
    /// Adds it to the graph.
    pub(super) convert: fn(&mut NodeContext<'_>) -> Outcome,
}

const FAMILIES: &[&[Operator]] = &[
    attention::OPERATORS,
    batch_norm::OPERATORS,
    composed::OPERATORS,
    constant::OPERATORS,
    convolution::OPERATORS,
    cumulative::OPERATORS,
    determinant::OPERATORS,
    einsum::OPERATORS,
    fourier::OPERATORS,
    grid::OPERATORS,
    index::OPERATORS,
    layout::OPERATORS,
    loss::OPERATORS,
    matrix::OPERATORS,
    normalization::OPERATORS,
    order::OPERATORS,
    pointwise::OPERATORS,
    patches::OPERATORS,
    pooling::OPERATORS,
    random::OPERATORS,
    rearrange::OPERATORS,
    recurrent::OPERATORS,
    reduction::OPERATORS,
    resize::OPERATORS,
    sampling::OPERATORS,
    scatter::OPERATORS,
    sequence::OPERATORS,
    signal::OPERATORS,
    state::OPERATORS,
];

/// The operator of this name and domain, if it is read.
pub(super) fn find(domain: &str, name: &str) -> Option<&'static Operator> {
    if (domain, name) == (selection::DOMAIN, selection::MASKED_SCATTER) {
        return Some(&scatter::SELECTION);
    }
    if domain == functions::DOMAIN {
        return function::OPERATORS.iter().find(|o| o.name == name);
    }
    if !(domain.is_empty() || domain == "ai.onnx") {
        return None;
    }
    FAMILIES.iter().flat_map(|f| f.iter()).find(|o| o.name == name)
}

/// Names of all operators that are read, sorted.
pub(super) fn names() -> Vec<&'static str> {
    let mut names: Vec<_> = FAMILIES.iter().flat_map(|f| f.iter()).map(|o| o.name).collect();
    names.sort_unstable();
    names
}

const fn op(
    name: &'static str,
    attributes: &'static [&'static str],
    convert: fn(&mut NodeContext<'_>) -> Outcome,
) -> Operator {
    Operator { name, attributes, convert }
}

fn one(value: frit_ir::ValueId) -> Outcome {
    Ok(vec![value.into()])
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_operator_is_read_in_one_way() {
        let names = super::names();
        let twice: Vec<_> = names.windows(2).filter(|w| w[0] == w[1]).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
}
