//! Gradients on random and on awkward shapes: sizes of 0 and 1, operands that broadcast, steps
//! backward, indices from the end and repeated ones, windows that overhang. The seeds are fixed.

mod indexing;
mod layout;
mod matmuls;
mod pointwise;
mod reductions;
mod windows;

use super::DIFFERENTIATED;
use frit_ir::Op;
use frit_ir::ops::UnaryFn;
use std::collections::BTreeSet;

/// Random shapes for each operation.
const CASES: usize = 24;

/// Choices that follow from a seed.
struct Random(fastrand::Rng);

impl Random {
    fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    /// An integer in `low..=high`.
    fn int(&mut self, low: usize, high: usize) -> usize {
        self.0.usize(low..=high)
    }

    fn flag(&mut self) -> bool {
        self.0.bool()
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.int(0, from.len() - 1)]
    }

    /// Sizes of 1 to 4, many of them 1.
    fn shape(&mut self, min_rank: usize, max_rank: usize) -> Vec<usize> {
        let rank = self.int(min_rank, max_rank);
        (0..rank).map(|_| self.pick(&[1, 1, 2, 3, 4])).collect()
    }

    /// The same, now and then with an axis of size 0.
    fn shape_or_empty(&mut self, min_rank: usize, max_rank: usize) -> Vec<usize> {
        let mut shape = self.shape(min_rank, max_rank);
        if !shape.is_empty() && self.int(0, 5) == 0 {
            let axis = self.int(0, shape.len() - 1);
            shape[axis] = 0;
        }
        shape
    }

    /// A shape that broadcasts to this one.
    fn smaller(&mut self, shape: &[usize]) -> Vec<usize> {
        let from = self.int(0, shape.len());
        shape[from..].iter().map(|n| if self.flag() { 1 } else { *n }).collect()
    }

    /// Some of these axes, at least one.
    fn axes(&mut self, rank: usize) -> Vec<usize> {
        let mut axes: Vec<usize> = (0..rank).filter(|_| self.flag()).collect();
        if axes.is_empty() {
            axes.push(self.int(0, rank - 1));
        }
        axes
    }

    fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.int(0, i));
        }
        order
    }

    /// As many of −1 and 1.
    fn signs(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| if self.flag() { 1.0 } else { -1.0 }).collect()
    }

    /// As many of 0 and 1.
    fn mask(&mut self, n: usize) -> Vec<i64> {
        (0..n).map(|_| i64::from(self.flag())).collect()
    }

    /// Indices into an axis of this size, from either end.
    fn indices(&mut self, n: usize, size: usize) -> Vec<i64> {
        (0..n).map(|_| self.int(0, 2 * size - 1) as i64 - size as i64).collect()
    }
}

/// One random case of every operation of a family.
type Family = fn(&mut Random);

const FAMILIES: [Family; 6] =
    [pointwise::case, layout::case, indexing::case, reductions::case, matmuls::case, windows::case];

fn each(seed: u64, case: Family) {
    let mut random = Random::new(seed);
    (0..CASES).for_each(|_| case(&mut random));
}

fn numel(shape: &[usize]) -> usize {
    shape.iter().product()
}

#[test]
fn pointwise_functions() {
    each(1, pointwise::case);
}

#[test]
fn layouts() {
    each(2, layout::case);
}

#[test]
fn indexed_reads_and_writes() {
    each(3, indexing::case);
}

#[test]
fn reductions_and_normalizations() {
    each(4, reductions::case);
}

#[test]
fn matmuls_and_attention() {
    each(5, matmuls::case);
}

#[test]
fn convolutions_and_pooling() {
    each(6, windows::case);
}

/// What is differentiated by a rule of its own: an operation, or a function that one is made with.
pub(super) fn rule_of(op: &Op) -> String {
    match op {
        Op::Reduce(r) => format!("reduce {:?}", r.f),
        Op::ScatterElements(s) => format!("scatter_elements {:?}", s.f),
        Op::ScatterNd(s) => format!("scatter_nd {:?}", s.f),
        op => op.name().into(),
    }
}

/// Every rule, as [`rule_of`] names it, read from the sources of the pass.
fn rules() -> BTreeSet<String> {
    use UnaryFn::{Ceil, Detach, Floor, Not, Round, Sign};
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/differentiate/rules");
    let sources: String = std::fs::read_dir(folder)
        .expect("the rules")
        .map(|file| std::fs::read_to_string(file.expect("a file").path()).expect("text"))
        .collect();
    let has_rule = |op: &Op| {
        let debug = format!("{op:?}");
        let variant = debug.split(|c: char| !c.is_alphanumeric()).next().expect("a name");
        let is_rule = |ty: String| sources.contains(&format!("\nimpl Differentiate for {ty} {{\n"));
        is_rule(variant.into()) || is_rule(format!("{variant}Fn"))
    };
    let is_differentiated = |op: &Op| match op {
        // Flat almost everywhere or said to be, or not of floats.
        Op::Unary(f) => ![Ceil, Detach, Floor, Not, Round, Sign].contains(f),
        // The others are gradients themselves.
        Op::Binary(f) => !f.name().ends_with("_grad"),
        op => has_rule(op),
    };
    assert!(has_rule(&Op::Unary(UnaryFn::Exp)) && !has_rule(&Op::UpdateStep));
    Op::examples().iter().filter(|op| is_differentiated(op)).map(rule_of).collect()
}

#[test]
fn every_rule_has_a_random_case() {
    DIFFERENTIATED.take();
    for (seed, case) in FAMILIES.into_iter().enumerate() {
        each(seed as u64, case);
    }
    let found = DIFFERENTIATED.take();
    let missing: Vec<String> = rules().difference(&found).cloned().collect();
    assert!(rules().len() > 80, "the sources of the rules are not understood");
    assert!(missing.is_empty(), "write a case in this folder for: {}", missing.join(", "));
}
