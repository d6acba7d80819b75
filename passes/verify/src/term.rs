//! Elements of tensors as terms over the real numbers, in a normal form: equal terms have the same id.
//!
//! A term is what an element of a value is, at an index: sums and products are flat and sorted, layout operations are index
//! arithmetic. Rounding to narrow dtypes is a function, or not there, and so is every operation where bits are compared ([`Algebra`]).
//! A reduction, or an operation that is not written out, is a *definition*: a function of indices, whose bound variables and
//! arguments are named canonically, and which terms apply.

use crate::choice::Truths;
use crate::index::{Affine, Atom, Ix, Var};
use crate::integer::Kind;
use crate::integer::WHOLE as INTEGERS;
use crate::lemmas::Results;
use frit_ir::{DType, Op, Tensor};
use rustc_hash::{FxHashMap, FxHashSet};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Names a term of [`Terms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TermId(pub(crate) u32);

/// A number by its bits, snapped to those that were seen; see [`Terms::number`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Number(u64);

impl Number {
    pub(crate) const ZERO: Number = Number(0);
    pub(crate) const ONE: Number = Number(1.0_f64.to_bits());

    pub(crate) fn value(self) -> f64 {
        f64::from_bits(self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Term {
    Number(Number),
    /// An index as a number: one atom.
    Index(Ix),
    /// An element of a leaf of the graph.
    Leaf(u32, Rc<[Ix]>),
    /// An element of a definition.
    Defined(u32, Rc<[Ix]>),
    /// Σ factor·term + constant.
    Sum(Rc<[(TermId, Number)]>, Number),
    /// Π termᵉ.
    Product(Rc<[(TermId, Number)]>),
    /// A function of elements.
    Apply(Function, Rc<[TermId]>),
    /// 1 where the index is not negative, else 0.
    NotNegative(Ix),
}

/// A function of elements that is not written out, with its attributes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Function {
    pub(crate) name: &'static str,
    pub(crate) attributes: [u64; 2],
}

/// What of numbers is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Algebra {
    /// They are real numbers.
    #[default]
    Real,
    /// They are, and besides rounded to narrow dtypes wherever the graphs round them.
    Rounded,
    /// Every bit: operations are functions without laws. Sums and products are those of indices, and of which part of a value an
    /// element is in.
    Bits,
}

/// What a definition is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Definition {
    /// A reduction of the body over all bound variables, of these extents; a function of its arguments.
    Reduce { by: &'static str, bound: Vec<u64>, body: TermId },
    /// A result of an operation that is not written out, a function of the axes of the result (and of the rank, if operands are).
    Opaque { op: Box<Op>, result: usize, is_integer: bool, operands: Vec<(TermId, Vec<usize>)> },
}

/// Colors of variables, and the hashes of terms with them.
#[derive(Default)]
pub(crate) struct Coloring {
    colors: FxHashMap<Var, u64>,
    seen: RefCell<FxHashMap<TermId, u64>>,
}

impl Coloring {
    pub(crate) fn new(colors: impl IntoIterator<Item = (Var, u64)>) -> Self {
        Coloring { colors: colors.into_iter().collect(), seen: RefCell::default() }
    }

    pub(crate) fn names(&self, var: Var) -> bool {
        self.colors.contains_key(&var)
    }

    pub(crate) fn of(&self, var: Var) -> u64 {
        self.colors.get(&var).copied().unwrap_or(0)
    }
}

/// So many parts of a sum or product take as much memory as a term.
const PARTS_OF_ONE: usize = 16;

/// How many terms a comparison may have. Each takes up to 500 bytes with all that is known of it; up to three comparisons are made at
/// once. The largest that is known, of a recurrence of 16 steps in two layers and directions, has 1.2 million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit(pub(crate) usize);

impl Default for Limit {
    fn default() -> Limit {
        Limit(6_000_000)
    }
}

/// All terms, indices and definitions of a comparison.
#[derive(Default)]
pub(crate) struct Terms {
    pub(crate) algebra: Algebra,
    pub(crate) limit: Limit,
    /// Terms that were made; a long sum or product counts as several.
    made: usize,
    /// Beyond the limit every term is this, so nothing that was computed is to be used.
    exhausted: Option<TermId>,
    /// Whether gradients are still to be taken: what passes them on, or does not, is a function without laws.
    pub(crate) before_gradients: bool,
    terms: Vec<Term>,
    term_ids: FxHashMap<Term, TermId>,
    /// A hash of each term that does not depend on the names of variables.
    shapes: Vec<u64>,
    /// How many parts a term is made of, and whether these are bounds or indices.
    sizes: Vec<(u32, bool)>,
    kinds: Vec<Kind>,
    truths: Vec<Truths>,
    vars: Vec<Rc<[Var]>>,
    /// The lists of variables: many terms have the same, which may be long.
    lists: FxHashSet<Rc<[Var]>>,
    affines: Vec<Affine>,
    affine_ids: FxHashMap<Affine, Ix>,
    ix_shapes: Vec<u64>,
    ix_vars: Vec<Rc<[Var]>>,
    pub(crate) definitions: Vec<Definition>,
    definition_ids: FxHashMap<Definition, u32>,
    /// Of a definition that is the same when two of its arguments, or several pairs of them, are exchanged: which take whose place.
    pub(crate) symmetries: FxHashMap<u32, Vec<usize>>,
    pub(crate) leaves: Vec<String>,
    leaf_ids: FxHashMap<String, u32>,
    /// Leaves whose elements are no real numbers.
    pub(crate) leaf_kinds: FxHashMap<u32, Kind>,
    /// Products of which known truths are one table.
    pub(crate) masked: FxHashMap<TermId, TermId>,
    /// Constants that are leaves, by their sizes.
    pub(crate) constants: FxHashMap<Vec<usize>, Vec<(Tensor, u32)>>,
    numbers: BTreeMap<u64, ()>,
    /// The numbers of substitutions.
    pub(crate) substitutions: FxHashMap<Vec<(Var, Ix)>, u32>,
    /// Terms after the substitution of a number.
    pub(crate) substituted: FxHashMap<(TermId, u32), TermId>,
    /// Sums of terms over a variable.
    pub(crate) sums: FxHashMap<(TermId, Var), TermId>,
    /// Operations as functions without laws, with the dtypes of their operands.
    pub(crate) functions: Vec<(Op, Vec<DType>)>,
    pub(crate) function_ids: FxHashMap<(Op, Vec<DType>), u64>,
    /// Definitions of large sums.
    pub(crate) names: FxHashMap<TermId, TermId>,
    /// What operations are of operands that were met before.
    pub(crate) results: Results,
    pub(crate) next_fresh: u32,
}

/// Scalars of two graphs that differ by no more, relatively, are the same, and what is left of equal terms that cancel is none: four
/// rounding errors of f32.
pub(crate) const SAME_NUMBER: f64 = 2.5e-7;

/// Numbers below this that are almost whole are.
const SNAPPED: f64 = 1e5;

/// No float is rounded to a narrow dtype by more, relatively.
const ROUNDED: f64 = 1.0 / 8.0;

/// Whether a number, or one that is the same, is rounded to another in this dtype.
pub(crate) fn is_rounded(x: f64, to: f64, dtype: DType) -> bool {
    let (x, to) = (x * to.signum(), to.abs());
    let rounded = |factor: f64| dtype.round(x * factor);
    rounded(1.0 - SAME_NUMBER) <= to && to <= rounded(1.0 + SAME_NUMBER)
}

/// Numbers from this one on exclude what they are added to or compared with.
const FILL: f64 = 1e9;

/// The largest finite number of a narrow dtype.
fn largest(dtype: DType) -> f64 {
    if dtype == DType::F16 { 65504.0 } else { 255.0 * 2f64.powi(120) }
}

impl Terms {
    pub(crate) fn of(algebra: Algebra) -> Terms {
        Terms { algebra, ..Terms::default() }
    }

    /// None, of the same kind.
    pub(crate) fn anew(&self) -> Terms {
        let Terms { algebra, before_gradients, limit, .. } = *self;
        Terms { algebra, before_gradients, limit, ..Terms::default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// What every term is since there are more than may be; nothing that was computed is then to be used.
    pub(crate) fn exhausted(&self) -> Option<TermId> {
        self.exhausted
    }

    /// The number, or one that differs by less than rounding and was seen before. Whole numbers below 2⁵³ are exact.
    pub(crate) fn number(&mut self, x: f64) -> Number {
        if x == 0.0 {
            return Number::ZERO;
        }
        if !x.is_finite() || self.algebra == Algebra::Bits {
            return Number(x.to_bits());
        }
        let whole = x.round();
        let is_whole = whole != 0.0 && (x - whole).abs() <= SAME_NUMBER * whole.abs();
        let x = if is_whole && whole.abs() < SNAPPED { whole } else { x };
        let key = x.abs().to_bits();
        let near = |k: &u64| (f64::from_bits(*k) - x.abs()).abs() <= SAME_NUMBER * x.abs();
        let below = self.numbers.range(..=key).next_back().map(|(k, ())| *k).filter(near);
        let above = self.numbers.range(key..).next().map(|(k, ())| *k).filter(near);
        // From 2⁵³ on every float is whole.
        let exact = (x.fract() == 0.0 && x.abs() < INTEGERS).then_some(key);
        let found = exact.or(below).or(above).unwrap_or(key);
        self.numbers.insert(found, ());
        Number(f64::from_bits(found).copysign(x).to_bits())
    }

    /// The number that was seen before and is this one when it is rounded to a narrow dtype, or the number itself. The largest one
    /// of a dtype stands for those that exceed it and only exclude.
    pub(crate) fn unrounded(&self, x: f64, dtype: DType) -> f64 {
        let size = x.abs();
        if size == largest(dtype) && !self.numbers.contains_key(&size.to_bits()) {
            let larger = self.numbers.range(size.max(FILL).to_bits()..).next();
            return larger.map_or(x, |(k, ())| f64::from_bits(*k).copysign(x));
        }
        let (low, high) = (size * (1.0 - ROUNDED), size * (1.0 + ROUNDED));
        if !x.is_finite() || self.numbers.contains_key(&size.to_bits()) {
            return x;
        }
        let near = self.numbers.range(low.to_bits()..=high.to_bits());
        let near = near.map(|(k, ())| f64::from_bits(*k)).filter(|y| is_rounded(*y, size, dtype));
        let distance = |y: &f64| (y - size).abs();
        let nearest = near.min_by(|a, b| distance(a).total_cmp(&distance(b)));
        nearest.unwrap_or(size).copysign(x)
    }

    pub(crate) fn get(&self, id: TermId) -> &Term {
        &self.terms[id.0 as usize]
    }

    pub(crate) fn affine(&self, ix: Ix) -> &Affine {
        &self.affines[ix.0 as usize]
    }

    #[cfg(test)]
    pub(crate) fn number_of_terms(&self) -> usize {
        self.terms.len()
    }

    /// Variables that occur in a term, sorted.
    pub(crate) fn vars_of(&self, id: TermId) -> &Rc<[Var]> {
        &self.vars[id.0 as usize]
    }

    pub(crate) fn vars_of_index(&self, ix: Ix) -> &Rc<[Var]> {
        &self.ix_vars[ix.0 as usize]
    }

    /// A hash of an index that is the same whatever the names of variables.
    pub(crate) fn shape_of_index(&self, ix: Ix) -> u64 {
        self.ix_shapes[ix.0 as usize]
    }

    /// How many parts a term is made of; none if these are bounds or indices.
    pub(crate) fn size_of(&self, id: TermId) -> Option<u32> {
        let (size, has_indices) = self.sizes[id.0 as usize];
        (!has_indices).then_some(size)
    }

    /// The same whatever these are; an operation that has a name in definitions is one part.
    pub(crate) fn parts_of(&self, id: TermId) -> u32 {
        self.sizes[id.0 as usize].0
    }

    pub(crate) fn kind(&self, id: TermId) -> Kind {
        self.kinds[id.0 as usize]
    }

    /// What a term is in regard to truth values.
    pub(crate) fn truths_of(&self, id: TermId) -> &Truths {
        &self.truths[id.0 as usize]
    }

    /// A hash that is the same whatever the names of variables.
    pub(crate) fn shape_of(&self, id: TermId) -> u64 {
        self.shapes[id.0 as usize]
    }

    pub(crate) fn index(&mut self, affine: Affine) -> Ix {
        if let Some(id) = self.affine_ids.get(&affine) {
            return *id;
        }
        let id = Ix(self.affines.len() as u32);
        let vars = self.vars_in_index(&affine);
        let shape = self.color_index_with(&affine, &Coloring::default());
        self.affine_ids.insert(affine.clone(), id);
        self.affines.push(affine);
        self.ix_vars.push(vars);
        self.ix_shapes.push(shape);
        id
    }

    pub(crate) fn term(&mut self, term: Term) -> TermId {
        if let Some(id) = self.exhausted.or(self.term_ids.get(&term).copied()) {
            return id;
        }
        self.made += match &term {
            Term::Sum(parts, _) | Term::Product(parts) => 1 + parts.len() / PARTS_OF_ONE,
            _ => 1,
        };
        if self.made > self.limit.0 {
            let none = Term::Apply(Function { name: "exhausted", attributes: [0; 2] }, [].into());
            let id = self.new_term(none);
            self.exhausted = Some(id);
            return id;
        }
        self.new_term(term)
    }

    fn new_term(&mut self, term: Term) -> TermId {
        let id = TermId(self.terms.len() as u32);
        let vars = self.vars_in_term(&term);
        let vars = self.shared(vars);
        let size = match &term {
            Term::Index(_) | Term::NotNegative(_) => (1, true),
            Term::Number(_) | Term::Leaf(..) | Term::Defined(..) => (1, false),
            Term::Sum(parts, _) | Term::Product(parts) => self.total(parts.iter().map(|p| p.0)),
            Term::Apply(_, operands) => self.total(operands.iter().copied()),
        };
        let shape = self.color_with(&term, &Coloring::default());
        self.kinds.push(self.kind_of(&term));
        let truths = self.truths_in(&term);
        self.term_ids.insert(term.clone(), id);
        self.terms.push(term);
        self.vars.push(vars);
        self.sizes.push(size);
        self.shapes.push(shape);
        self.truths.push(truths);
        id
    }

    /// The list of variables that was made before, if it is one.
    fn shared(&mut self, vars: Rc<[Var]>) -> Rc<[Var]> {
        if let Some(list) = self.lists.get(&vars) {
            return list.clone();
        }
        self.lists.insert(vars.clone());
        vars
    }

    /// How many parts terms are made of, and whether these are bounds or indices.
    fn total(&self, terms: impl Iterator<Item = TermId>) -> (u32, bool) {
        terms.fold((1, false), |(all, has), t| {
            let (size, is) = self.sizes[t.0 as usize];
            (all.saturating_add(if self.has_name(t) { 1 } else { size }), has || is)
        })
    }

    pub(crate) fn define(&mut self, definition: Definition) -> u32 {
        if let Some(id) = self.definition_ids.get(&definition) {
            return *id;
        }
        let id = self.definitions.len() as u32;
        self.definition_ids.insert(definition.clone(), id);
        self.definitions.push(definition);
        id
    }

    pub(crate) fn leaf(&mut self, key: &str) -> u32 {
        if let Some(id) = self.leaf_ids.get(key) {
            return *id;
        }
        let id = self.leaves.len() as u32;
        self.leaf_ids.insert(key.into(), id);
        self.leaves.push(key.into());
        id
    }

    /// The hash of a term in which variables have colors; those without one are told apart by their extents alone.
    pub(crate) fn color(&self, id: TermId, colors: &Coloring) -> u64 {
        if !self.vars_of(id).iter().any(|v| colors.names(*v)) {
            return self.shape_of(id);
        }
        if let Some(hash) = colors.seen.borrow().get(&id) {
            return *hash;
        }
        let hash = self.color_with(self.get(id), colors);
        colors.seen.borrow_mut().insert(id, hash);
        hash
    }

    fn color_with(&self, term: &Term, colors: &Coloring) -> u64 {
        let list = |tag: u64, head: u64, at: &[Ix]| {
            let indices = at.iter().map(|ix| self.color_index(*ix, colors));
            indices.fold(mix(tag, head), mix)
        };
        let bag = |tag: u64, parts: &[(TermId, Number)]| {
            let mut hashes: Vec<u64> =
                parts.iter().map(|(t, n)| mix(self.color(*t, colors), n.0)).collect();
            hashes.sort_unstable();
            hashes.into_iter().fold(tag, mix)
        };
        match term {
            Term::Number(n) => mix(1, n.0),
            Term::Index(ix) => mix(2, self.color_index(*ix, colors)),
            Term::Leaf(leaf, at) => list(3, u64::from(*leaf), at),
            Term::Defined(definition, at) => {
                let of = |at: &[Ix]| list(4, u64::from(*definition), at);
                of(at).wrapping_add(self.exchanged(*definition, at).map_or(0, |other| of(&other)))
            }
            Term::Sum(parts, constant) => mix(bag(5, parts), constant.0),
            Term::Product(parts) => bag(6, parts),
            Term::Apply(function, operands) => {
                let name = function.name.bytes().fold(7, |h, b| mix(h, u64::from(b)));
                let head = function.attributes.iter().fold(name, |h, a| mix(h, *a));
                operands.iter().map(|t| self.color(*t, colors)).fold(head, mix)
            }
            Term::NotNegative(ix) => mix(8, self.color_index(*ix, colors)),
        }
    }

    pub(crate) fn color_index(&self, ix: Ix, colors: &Coloring) -> u64 {
        if !self.vars_of_index(ix).iter().any(|v| colors.names(*v)) {
            return self.ix_shapes[ix.0 as usize];
        }
        self.color_index_with(self.affine(ix), colors)
    }

    fn color_atom(&self, atom: Atom, colors: &Coloring) -> u64 {
        match atom {
            Atom::Var(v) => mix(mix(11, v.extent), colors.of(v)),
            Atom::Div(of, n) => mix(mix(12, self.color_index(of, colors)), n as u64),
            Atom::Mod(of, n) => mix(mix(13, self.color_index(of, colors)), n as u64),
            Atom::Data(term) => mix(14, self.color(term, colors)),
        }
    }

    fn color_index_with(&self, affine: &Affine, colors: &Coloring) -> u64 {
        let mut hashes: Vec<u64> = affine
            .atoms
            .iter()
            .map(|&(atom, factor)| mix(self.color_atom(atom, colors), factor as u64))
            .collect();
        hashes.sort_unstable();
        hashes.into_iter().fold(affine.constant as u64, mix)
    }
}

/// Mixes two hashes (the finalizer of splitmix64).
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23)
        ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x1234_5678_9ABC_DEF1);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
