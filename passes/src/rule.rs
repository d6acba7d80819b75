//! What a rewrite rule states, as data beside it.
//!
//! A rule has a [`Claim`], and a claim that a rule is exact holds what its proof needs: a rule without one does not compile. The
//! tests in `proof/` apply every rule to its left sides and have Z3 refute that any element changes; docs/verification.md lists the
//! rules and how each is proved.
//!
//! A left side is written as an expression of the text form's operations, statements separated by `;`, for instance
//! `transpose{perm=<perm>}(x:f32[*])`. `x:f32[a,b]` is an input, `$w:…` a sharded parameter, `%t:…` a whole one, `1.0:f32[]` a
//! constant. The letters a to h are sizes: the proof holds for all sizes. `[*]` is every shape of at most four axes,
//! `<perm>` every permutation of them, `<axis>` every axis, `<x|y>` x or y, and `<T=x|y>` the same with a name: `<T>` is the same choice
//! again.

use crate::{canonicalize, raise, simplify};

/// A rewrite rule: what it states.
#[derive(Clone, Copy, Debug)]
pub struct Statement {
    /// Its name, unique in its pass.
    pub name: &'static str,
    /// The equation, with its conditions.
    pub equation: &'static str,
    /// How much of it is kept, and the obligation that shows it.
    pub claim: Claim,
}

/// What stays equal, and the left sides with which that is proved.
#[derive(Clone, Copy, Debug)]
pub enum Claim {
    /// Every bit, whatever the elements are: proved with elements, casts and functions of them uninterpreted.
    Bits(&'static [&'static str]),
    /// Every bit (a NaN is a NaN): proved over bit-vector floats and integers.
    Floats(&'static [&'static str]),
    /// The real number; floats are rounded elsewhere. Proved over the reals.
    Reals(&'static [&'static str]),
    /// Shown by a test that executes every case, and why not otherwise.
    Tested {
        /// Whether every bit stays equal, rather than the real number.
        bits: bool,
        /// The test.
        test: &'static str,
        /// Why there is no proof.
        why: &'static str,
    },
    /// Nothing: results may be rounded otherwise. Such a rule is off unless asked for.
    Approximate,
}

/// What all rules of the passes that rewrite state, with the name of the pass.
pub fn statements() -> Vec<(&'static str, Statement)> {
    let canonicalize = canonicalize::RULES.iter().copied().flatten().map(|rule| rule.statement);
    let canonicalize = canonicalize.chain([canonicalize::loss::BIAS]);
    let raise = raise::RULES.iter().map(|rule| rule.statement);
    let simplify = simplify::rules::all().into_iter().map(|rule| rule.statement);
    let simplify = simplify.chain([simplify::softmax::LAST_AXIS]);
    canonicalize
        .map(|statement| ("canonicalize", statement))
        .chain(raise.map(|statement| ("raise", statement)))
        .chain(simplify.map(|statement| ("simplify", statement)))
        .collect()
}

impl Claim {
    /// Whether results stay equal bit for bit.
    pub fn is_bits(&self) -> bool {
        matches!(self, Claim::Bits(_) | Claim::Floats(_) | Claim::Tested { bits: true, .. })
    }
}

impl Statement {
    /// A rule that keeps every bit, whatever the elements are.
    pub(crate) const fn bits(
        name: &'static str,
        equation: &'static str,
        before: &'static [&'static str],
    ) -> Self {
        Statement { name, equation, claim: Claim::Bits(before) }
    }

    /// A rule that keeps every bit by the arithmetic of floats or integers.
    pub(crate) const fn floats(
        name: &'static str,
        equation: &'static str,
        before: &'static [&'static str],
    ) -> Self {
        Statement { name, equation, claim: Claim::Floats(before) }
    }

    /// A rule that keeps the real number.
    pub(crate) const fn reals(
        name: &'static str,
        equation: &'static str,
        before: &'static [&'static str],
    ) -> Self {
        Statement { name, equation, claim: Claim::Reals(before) }
    }
}
