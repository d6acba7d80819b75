//! A value of a graph at a symbolic index, as a term of SMT-LIB, for symbolic sizes.
//!
//! A graph is built with large primes as sizes; every number in its shapes and attributes that is a size, or a product, sum or
//! difference of some, stands for that. Layout operations become maps of indices; the functions of elements are in `elements.rs`,
//! reductions in `reductions.rs`.

use super::Solver;
use super::elements::Elements;
use super::pattern::{LETTERS, Sizes};
use super::reductions::Lane;
use easy_smt::{Context, Response, SExpr};
use frit_ir::{DType, Graph, Op, ValueId};
use std::collections::{HashMap, HashSet};

/// Numbers from here on are sizes, smaller ones themselves.
const FIRST_SIZE: usize = 100;

/// What stands for the sizes a to h. Their sums, differences and products are distinct, as far as rules make any.
pub(super) const SIZES: Sizes = [101, 211, 431, 877, 1783, 3571, 7177, 14407];

/// Other such numbers, with which rules must state the same.
pub(super) const OTHER_SIZES: Sizes = [107, 227, 467, 953, 1931, 3907, 7901, 15907];

/// What each number stands for, as text and in SMT-LIB: a sum of products of sizes, and a small number.
pub(super) fn size_names(sizes: Sizes) -> HashMap<usize, (String, String)> {
    let mut names: HashMap<usize, (String, String)> = HashMap::new();
    // Factors and the sizes that they multiply; what is simple goes first.
    let mut add = |terms: &[(i64, Vec<usize>)], small: i64| {
        let product = |of: &Vec<usize>| of.iter().map(|i| sizes[*i] as i64).product::<i64>();
        let number = small + terms.iter().map(|(factor, of)| factor * product(of)).sum::<i64>();
        let Some(number) = usize::try_from(number).ok().filter(|n| *n >= FIRST_SIZE) else {
            return;
        };
        let (mut text, mut smt) = (String::new(), format!("(+ {}", smt_int(small)));
        for (factor, of) in terms {
            let sign = if *factor < 0 { "-" } else { "+" };
            let times = if factor.abs() > 1 { format!("{}*", factor.abs()) } else { String::new() };
            let letters: Vec<String> = of.iter().map(|i| LETTERS[*i].to_string()).collect();
            text += &format!("{sign}{times}{}", letters.join("*"));
            let letters: String = letters.iter().map(|c| format!(" |size_{c}|")).collect();
            smt += &format!(" (* {}{letters})", smt_int(*factor));
        }
        let text = text.trim_start_matches('+').to_string();
        let text = if small == 0 { text } else { format!("{text}{small:+}") };
        names.entry(number).or_insert((text, smt + ")"));
    };
    let one = |i: usize| (1, vec![i]);
    (0..8).for_each(|i| add(&[one(i)], 0));
    for i in 0..8 {
        (-8..=8).for_each(|small| add(&[one(i)], small));
    }
    for subset in 1usize..256 {
        let members: Vec<usize> = (0..8).filter(|i| subset >> i & 1 == 1).collect();
        if members.len() <= 5 {
            add(&[(1, members.clone())], 0);
        }
        if members.len() <= 3 {
            add(&members.into_iter().map(one).collect::<Vec<_>>(), 0);
        }
    }
    for (i, j) in (0..8).flat_map(|i| (0..8).map(move |j| (i, j))) {
        for factor in [1, -1, 2, -2, 3, -3] {
            add(&[one(i), (factor, vec![j])], 0);
        }
    }
    names
}

fn smt_int(n: i64) -> String {
    if n < 0 { format!("(- {})", -n) } else { n.to_string() }
}

/// Encodes one pair of values of one graph.
pub(super) struct Encoder<'a> {
    pub(super) smt: &'a mut Context,
    pub(super) graph: &'a Graph,
    pub(super) elements: Elements,
    names: HashMap<usize, (String, String)>,
    declared: HashSet<String>,
    n_fresh: usize,
    memo: HashMap<(ValueId, Vec<SExpr>), SExpr>,
    splits: HashMap<(SExpr, Vec<usize>), Vec<SExpr>>,
    /// The places that these are coordinates of, by the sizes of the box.
    merged: HashMap<(Vec<SExpr>, Vec<usize>), SExpr>,
    /// Places in a box as `high · width + low`, for every axis at which it is cut.
    cuts: HashMap<(SExpr, usize), (SExpr, SExpr)>,
    pub(super) lanes: Vec<Lane>,
    pub(super) context: Vec<usize>,
    pub(super) facts: super::elements::Facts,
}

impl<'a> Encoder<'a> {
    /// Whether the two values may differ: `Unsat` if they never do.
    pub(super) fn differ(
        solver: &'a mut Solver,
        graph: &'a Graph,
        elements: Elements,
        [before, after]: [ValueId; 2],
    ) -> Response {
        let bits = elements == Elements::Floats;
        if bits || solver.asked_bits {
            solver.restart(bits);
        }
        let smt = &mut solver.process;
        if !bits {
            smt.push().expect("the solver runs");
        }
        let mut encoder = Encoder {
            smt,
            graph,
            elements,
            names: size_names(SIZES),
            declared: HashSet::new(),
            n_fresh: 0,
            memo: HashMap::new(),
            splits: HashMap::new(),
            merged: HashMap::new(),
            cuts: HashMap::new(),
            lanes: Vec::new(),
            context: Vec::new(),
            facts: Default::default(),
        };
        if !bits {
            encoder.declare_sorts();
            encoder.sizes_are_positive();
        }
        let dims = graph.ty(before).shape.0.clone();
        let at: Vec<SExpr> = dims.iter().map(|n| encoder.index_below(*n)).collect();
        let (x, y) = (encoder.at(before, &at), encoder.at(after, &at));
        encoder.equal_lanes_are_equal();
        let differ = encoder.apply("not", &[encoder.apply("=", &[x, y])]);
        encoder.assert(differ);
        let response = encoder.smt.check().expect("the solver answers");
        if !bits {
            encoder.smt.pop().expect("the solver runs");
        }
        response
    }

    /// Lanes, and the elements of each type of which nothing is known.
    fn declare_sorts(&mut self) {
        let floats = [DType::F64, DType::F32, DType::F16, DType::BF16];
        let elements = floats.map(|dtype| format!("Element_{}", dtype.name()));
        for sort in ["Lane".to_string()].into_iter().chain(elements) {
            self.smt.declare_sort(sort, 0).expect("the solver takes the sort");
        }
    }

    fn sizes_are_positive(&mut self) {
        for letter in LETTERS {
            let name = format!("size_{letter}");
            let size = self.constant(&name, self.smt.int_sort());
            let (low, high) = (self.int(1), self.int(1 << 48));
            let bounds = [self.apply("<=", &[low, size]), self.apply("<=", &[size, high])];
            self.assert(self.apply("and", &bounds));
        }
    }

    pub(super) fn apply(&self, f: &str, arguments: &[SExpr]) -> SExpr {
        if arguments.is_empty() {
            return self.smt.atom(f);
        }
        self.smt.list([&[self.smt.atom(f)], arguments].concat())
    }

    pub(super) fn int(&self, n: i64) -> SExpr {
        match n < 0 {
            true => self.apply("-", &[self.smt.numeral(n.unsigned_abs())]),
            false => self.smt.numeral(n),
        }
    }

    pub(super) fn assert(&mut self, fact: SExpr) {
        self.smt.assert(fact).expect("the solver takes the fact");
    }

    /// A constant of this name.
    pub(super) fn constant(&mut self, name: &str, sort: SExpr) -> SExpr {
        self.function(name, &[], sort)
    }

    pub(super) fn fresh(&mut self, sort: SExpr) -> SExpr {
        self.n_fresh += 1;
        self.constant(&format!("fresh_{}", self.n_fresh), sort)
    }

    /// A function of this name, declared when first used, of these arguments.
    pub(super) fn function(
        &mut self,
        name: &str,
        arguments: &[(SExpr, SExpr)],
        result: SExpr,
    ) -> SExpr {
        let quoted = format!("|{name}|");
        if self.declared.insert(quoted.clone()) {
            let sorts = arguments.iter().map(|(_, sort)| *sort).collect();
            self.smt.declare_fun(quoted.as_str(), sorts, result).expect("the solver takes it");
        }
        let values: Vec<SExpr> = arguments.iter().map(|(value, _)| *value).collect();
        self.apply(&quoted, &values)
    }

    /// The term of a number in a shape or an attribute.
    pub(super) fn size(&self, n: usize) -> SExpr {
        if n < FIRST_SIZE {
            return self.smt.numeral(n as u64);
        }
        let (_, term) = self.names.get(&n).unwrap_or_else(|| panic!("{n} is no size"));
        self.smt.atom(term.as_str())
    }

    /// A fresh index into an axis of this size.
    pub(super) fn index_below(&mut self, size: usize) -> SExpr {
        let index = self.fresh(self.smt.int_sort());
        self.assert(self.is_below(index, size));
        index
    }

    pub(super) fn is_below(&self, index: SExpr, size: usize) -> SExpr {
        let (low, high) = (self.int(0), self.size(size));
        self.apply("and", &[self.apply("<=", &[low, index]), self.apply("<", &[index, high])])
    }

    pub(super) fn dims(&self, v: ValueId) -> Vec<usize> {
        self.graph.ty(v).shape.0.clone()
    }

    pub(super) fn dtype(&self, v: ValueId) -> DType {
        self.graph.ty(v).dtype
    }

    /// The element of the value at this index.
    pub(super) fn at(&mut self, v: ValueId, index: &[SExpr]) -> SExpr {
        let dims = self.dims(v);
        assert_eq!(dims.len(), index.len(), "{}", self.graph.def(v).op.name());
        let zero = self.int(0);
        let only = |(i, n): (&SExpr, &usize)| if *n == 1 { zero } else { *i };
        let index: Vec<SExpr> = index.iter().zip(&dims).map(only).collect();
        if let Some(term) = self.memo.get(&(v, index.clone())) {
            return *term;
        }
        let term = self.element(v, &index);
        self.memo.insert((v, index), term);
        term
    }

    /// The element of an operand that broadcasts to the shape that is indexed.
    pub(super) fn at_broadcast(&mut self, v: ValueId, index: &[SExpr]) -> SExpr {
        let rank = self.graph.ty(v).shape.rank();
        self.at(v, &index[index.len() - rank..])
    }

    fn element(&mut self, v: ValueId, index: &[SExpr]) -> SExpr {
        let graph = self.graph;
        let node = graph.def(v);
        let inputs = &node.inputs;
        let (mut index, dims) = (index.to_vec(), self.dims(v));
        match &node.op {
            Op::Input(_) | Op::Param(_) => {
                let name = frit_ir::interpret::leaf_key(&node.op).expect("a leaf has a name");
                if self.elements == Elements::Floats {
                    assert!(dims.iter().all(|n| *n == 1), "bits are those of one element");
                    index.clear();
                }
                let int = self.smt.int_sort();
                let arguments: Vec<(SExpr, SExpr)> = index.iter().map(|i| (*i, int)).collect();
                let sort = self.sort(self.dtype(v));
                self.function(&format!("leaf {name}"), &arguments, sort)
            }
            // Every element of a shard, from the rank that holds it.
            Op::AllGather(_) => self.at(inputs[0], &index),
            Op::Reshape(_) => {
                let index = self.reshaped(&dims, &self.dims(inputs[0]), &index);
                self.at(inputs[0], &index)
            }
            Op::Transpose(op) => {
                let mut from = index.clone();
                op.perm.iter().zip(&index).for_each(|(p, i)| from[*p] = *i);
                self.at(inputs[0], &from)
            }
            Op::Expand(_) => self.at_broadcast(inputs[0], &index),
            Op::Slice(op) => {
                for (axis, i) in index.iter_mut().enumerate() {
                    let step = self.int(op.step[axis] as i64);
                    let start = self.size(op.start[axis]);
                    *i = self.apply("+", &[start, self.apply("*", &[step, *i])]);
                }
                self.at(inputs[0], &index)
            }
            Op::Concat(op) => self.concatenated(inputs, op.axis, &index),
            Op::Split(op) => {
                let part = node.outputs.iter().position(|o| *o == v).expect("its own result");
                for size in &op.sizes[..part] {
                    index[op.axis] = self.apply("+", &[index[op.axis], self.size(*size)]);
                }
                self.at(inputs[0], &index)
            }
            Op::Pad(op) => {
                let from = self.dims(inputs[0]);
                let mut inside = Vec::new();
                for (axis, i) in index.iter_mut().enumerate() {
                    *i = self.apply("-", &[*i, self.size(op.low[axis])]);
                    inside.push(self.is_below(*i, from[axis]));
                }
                let inside = self.apply("and", &inside);
                let x = self.at(inputs[0], &index);
                let border = self.number(self.dtype(v), op.value);
                self.apply("ite", &[inside, x, border])
            }
            Op::Embedding(_) => self.gathered(inputs, 0, &index),
            Op::Gather(op) => self.gathered(inputs, op.axis, &index),
            Op::GatherElements(op) => {
                let row = self.at(inputs[1], &index);
                index[op.axis] = self.resolved(row, self.dims(inputs[0])[op.axis]);
                self.at(inputs[0], &index)
            }
            op if op.is_pointwise() || matches!(op, Op::Constant(_)) => {
                let operands: Vec<SExpr> =
                    inputs.iter().map(|x| self.at_broadcast(*x, &index)).collect();
                self.function_of_elements(v, &operands)
            }
            _ => self.reduction(v, &index),
        }
    }

    fn concatenated(&mut self, parts: &[ValueId], axis: usize, index: &[SExpr]) -> SExpr {
        let (last, rest) = parts.split_last().expect("a concat has operands");
        let (mut index, mut found) = (index.to_vec(), Vec::new());
        for part in rest {
            let size = self.size(self.dims(*part)[axis]);
            let here = self.apply("<", &[index[axis], size]);
            found.push((here, self.at(*part, &index)));
            index[axis] = self.apply("-", &[index[axis], size]);
        }
        let last = self.at(*last, &index);
        found.into_iter().rev().fold(last, |rest, (here, x)| self.apply("ite", &[here, x, rest]))
    }

    /// Rows of the data along an axis; a negative index counts from the end.
    fn gathered(&mut self, inputs: &[ValueId], axis: usize, index: &[SExpr]) -> SExpr {
        let n_ids = self.graph.ty(inputs[1]).shape.rank();
        let row = self.at(inputs[1], &index[axis..axis + n_ids]);
        let row = self.resolved(row, self.dims(inputs[0])[axis]);
        let index = [&index[..axis], &[row], &index[axis + n_ids..]].concat();
        self.at(inputs[0], &index)
    }

    fn resolved(&mut self, row: SExpr, size: usize) -> SExpr {
        let (zero, size) = (self.int(0), self.size(size));
        // Anything else is an error of the data.
        let low = self.apply("<=", &[self.apply("-", &[size]), row]);
        self.assert(self.apply("and", &[low, self.apply("<", &[row, size])]));
        let negative = self.apply("<", &[row, zero]);
        self.apply("ite", &[negative, self.apply("+", &[row, size]), row])
    }

    /// The index into shape `to` of the element at `index` of shape `from`. Both are cut into the smallest groups of axes
    /// of as many elements.
    fn reshaped(&mut self, from: &[usize], to: &[usize], index: &[SExpr]) -> Vec<SExpr> {
        let mut result = vec![self.int(0); to.len()];
        let large = |dims: &[usize]| (0..dims.len()).filter(|i| dims[*i] != 1).collect::<Vec<_>>();
        let (mut sources, mut targets) = (large(from), large(to));
        sources.reverse();
        targets.reverse();
        while let (Some(source), Some(target)) = (sources.pop(), targets.pop()) {
            let (mut ins, mut outs) = (vec![source], vec![target]);
            let product =
                |axes: &[usize], dims: &[usize]| axes.iter().map(|i| dims[*i]).product::<usize>();
            while product(&ins, from) != product(&outs, to) {
                match product(&ins, from) < product(&outs, to) {
                    true => ins.push(sources.pop().expect("as many elements")),
                    false => outs.push(targets.pop().expect("as many elements")),
                }
            }
            let (parts, widths): (Vec<SExpr>, Vec<usize>) =
                ins.iter().map(|i| (index[*i], from[*i])).unzip();
            let flat = self.merge(&parts, &widths);
            let sizes: Vec<usize> = outs.iter().map(|i| to[*i]).collect();
            for (axis, i) in outs.into_iter().zip(self.split(flat, &sizes)) {
                result[axis] = i;
            }
        }
        result
    }

    /// The place in a box of these sizes at these coordinates.
    fn merge(&mut self, parts: &[SExpr], sizes: &[usize]) -> SExpr {
        if let Some(known) = self.merged.get(&(parts.to_vec(), sizes.to_vec())) {
            return *known;
        }
        let mut flat = parts[0];
        for (part, size) in parts.iter().zip(sizes).skip(1) {
            let scaled = self.apply("*", &[flat, self.size(*size)]);
            flat = self.apply("+", &[scaled, *part]);
        }
        self.merged.insert((parts.to_vec(), sizes.to_vec()), flat);
        for cut in 1..parts.len() {
            let high = self.merge(&parts[..cut], &sizes[..cut]);
            let low = self.merge(&parts[cut..], &sizes[cut..]);
            self.cuts.insert((flat, sizes[cut..].iter().product()), (high, low));
        }
        flat
    }

    /// The coordinates of a place in a box of these sizes: the quotient and remainder by the inner sizes, and so on. Unless the
    /// place was put together from them, they are constants with their definition, which suits the solver better than divisions.
    pub(super) fn split(&mut self, flat: SExpr, sizes: &[usize]) -> Vec<SExpr> {
        let [first, inner @ ..] = sizes else { return Vec::new() };
        if inner.is_empty() {
            return vec![flat];
        }
        let width: usize = inner.iter().product();
        if let Some((high, low)) = self.cuts.get(&(flat, width)).copied() {
            let rest = self.split(low, inner);
            return [vec![high], rest].concat();
        }
        if let Some(known) = self.splits.get(&(flat, sizes.to_vec())) {
            return known.clone();
        }
        let [quotient, remainder] = [(); 2].map(|()| self.fresh(self.smt.int_sort()));
        let sum = self.apply("+", &[self.apply("*", &[quotient, self.size(width)]), remainder]);
        let definition = [
            self.is_below(quotient, *first),
            self.is_below(remainder, width),
            self.apply("=", &[flat, sum]),
        ];
        // Elsewhere there is no element.
        let inside = [
            self.apply("<=", &[self.int(0), flat]),
            self.apply("<", &[flat, self.apply("*", &[self.size(*first), self.size(width)])]),
        ];
        let definition = self.apply("and", &definition);
        self.assert(self.apply("=>", &[self.apply("and", &inside), definition]));
        let rest = self.split(remainder, inner);
        let all = [vec![quotient], rest].concat();
        self.splits.insert((flat, sizes.to_vec()), all.clone());
        self.merged.insert((all.clone(), sizes.to_vec()), flat);
        all
    }
}
