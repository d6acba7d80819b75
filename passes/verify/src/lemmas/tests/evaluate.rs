//! Terms as numbers.

use crate::index::{Atom, Ix, Kind, Var};
use crate::operation::OPERATION;
use crate::term::{Definition, Function, Term, TermId, Terms};
use crate::truth::WITH_INFINITY;
use frit_ir::interpret::{Options, eval_op};
use frit_ir::ops::{BinaryFn, CompareFn, Op, UnaryFn};
use frit_ir::{DType, Tensor, TensorData, TensorType};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

/// Values of variables; of those with one value, 0.
pub(super) type Values = Vec<(Var, i64)>;

/// Sizes of a leaf's indices, and its elements.
pub(super) type Leaf = (Vec<usize>, Vec<f64>);

/// A definition, and values of its arguments.
type Applied = (u32, Vec<i64>);

/// What stands for elements that do not exist.
const OUTSIDE: f64 = 0.8125;

/// Evaluates terms.
pub(super) struct Numbers<'a> {
    t: &'a Terms,
    leaves: HashMap<u32, Leaf>,
    /// Types of the operands of operations, by their names.
    types: HashMap<&'static str, Vec<DType>>,
    /// Whether functions are of integers.
    pub(super) integers: bool,
    seen: RefCell<HashMap<Applied, f64>>,
    results: RefCell<HashMap<Applied, Rc<Tensor>>>,
}

impl<'a> Numbers<'a> {
    /// With the elements of leaves by their keys; constants have theirs.
    pub(super) fn new(
        t: &'a Terms,
        given: &HashMap<String, Leaf>,
        types: HashMap<&'static str, Vec<DType>>,
    ) -> Self {
        let named = |(k, key): (usize, &String)| Some((k as u32, given.get(key)?.clone()));
        let mut leaves: HashMap<u32, Leaf> =
            t.leaves.iter().enumerate().filter_map(named).collect();
        for (sizes, all) in &t.constants {
            leaves.extend(all.iter().map(|(x, leaf)| (*leaf, (sizes.clone(), x.to_f64s()))));
        }
        let (seen, results) = Default::default();
        Numbers { t, leaves, types, integers: false, seen, results }
    }

    pub(super) fn of(&self, id: TermId, values: &Values) -> f64 {
        let list = |at: &[Ix]| at.iter().map(|ix| self.index(*ix, values)).collect::<Vec<i64>>();
        match self.t.get(id) {
            Term::Number(x) => x.value(),
            Term::Index(ix) => self.index(*ix, values) as f64,
            Term::NotNegative(ix) => f64::from(self.index(*ix, values) >= 0),
            Term::Leaf(leaf, at) => self.leaf(*leaf, &list(at)),
            Term::Defined(definition, at) => self.defined(*definition, list(at)),
            Term::Sum(parts, constant) => {
                let parts = parts.iter().map(|(t, f)| f.value() * self.of(*t, values));
                parts.sum::<f64>() + constant.value()
            }
            Term::Product(factors) => {
                // What is excluded may have no value.
                let is_zero = |t: TermId| self.t.is_truth(t) && self.of(t, values) == 0.0;
                if factors.iter().any(|(t, _)| is_zero(*t)) {
                    return 0.0;
                }
                let factors = factors.iter().map(|(t, e)| match e.value() {
                    1.0 => self.of(*t, values),
                    e => self.of(*t, values).powf(e),
                });
                factors.product()
            }
            Term::Apply(function, operands) => match (function.name, &operands[..]) {
                ("select", &[c, a, b]) => {
                    self.of(if self.of(c, values) == 0.0 { b } else { a }, values)
                }
                // The others say that the product is along all axes.
                ("factor", _) => self.of(operands[0], values),
                _ => {
                    let operands = operands.iter().map(|t| self.of(*t, values)).collect::<Vec<_>>();
                    self.apply(function, &operands)
                }
            },
        }
    }

    fn index(&self, ix: Ix, values: &Values) -> i64 {
        let affine = self.t.affine(ix);
        let atoms = affine.atoms.iter().map(|&(atom, factor)| {
            let value = match atom {
                Atom::Var(var) => {
                    let found = values.iter().find(|(v, _)| *v == var);
                    found.unwrap_or_else(|| panic!("{var:?} has no value")).1
                }
                Atom::Div(of, n) => self.index(of, values).div_euclid(n),
                Atom::Mod(of, n) => self.index(of, values).rem_euclid(n),
                Atom::Data(term) => self.of(term, values) as i64,
            };
            factor * value
        });
        atoms.sum::<i64>() + affine.constant
    }

    /// An element, where a negative index counts from the end; any number outside, which nothing may depend on.
    fn leaf(&self, leaf: u32, at: &[i64]) -> f64 {
        let (sizes, elements) = &self.leaves[&leaf];
        assert_eq!(sizes.len(), at.len(), "`{}` at {at:?}", self.t.leaves[leaf as usize]);
        let mut place = 0;
        for (&n, &ix) in sizes.iter().zip(at) {
            let n = n as i64;
            let ix = if ix < 0 { ix + n } else { ix };
            if ix < 0 || ix >= n {
                return OUTSIDE;
            }
            place = place * n + ix;
        }
        elements[place as usize]
    }

    fn defined(&self, definition: u32, at: Vec<i64>) -> f64 {
        let key = (definition, at);
        if let Some(found) = self.seen.borrow().get(&key) {
            return *found;
        }
        let value = match &self.t.definitions[definition as usize] {
            Definition::Reduce { by, bound, body } => self.reduced(by, bound, *body, &key.1),
            Definition::Opaque { op, result, operands, .. } => {
                self.opaque(definition, (op, *result, operands), &key.1)
            }
        };
        self.seen.borrow_mut().insert(key, value);
        value
    }

    fn reduced(&self, by: &str, bound: &[u64], body: TermId, at: &[i64]) -> f64 {
        let arguments = self.arguments(&[body], at);
        let elements = places(bound).map(|place| {
            let named = bound.iter().zip(&place).enumerate().map(|(k, (&extent, &ix))| {
                (Var { kind: Kind::Bound, number: k as u32, extent }, ix)
            });
            self.of(body, &named.chain(arguments.iter().copied()).collect())
        });
        match by {
            "sum" => elements.sum(),
            "max" => elements.fold(f64::NEG_INFINITY, f64::max),
            "min" => elements.fold(f64::INFINITY, f64::min),
            "prod" => elements.product(),
            _ => panic!("a reduction by {by}"),
        }
    }

    /// The values of the arguments that occur.
    fn arguments(&self, terms: &[TermId], at: &[i64]) -> Values {
        let vars = terms.iter().flat_map(|t| self.t.vars_of(*t).iter());
        let vars: BTreeSet<&Var> = vars.filter(|v| v.kind == Kind::Argument).collect();
        vars.into_iter().map(|v| (*v, at[v.number as usize])).collect()
    }

    fn opaque(
        &self,
        definition: u32,
        (op, result, operands): (&Op, usize, &[(TermId, Vec<usize>)]),
        at: &[i64],
    ) -> f64 {
        let terms: Vec<TermId> = operands.iter().map(|(t, _)| *t).collect();
        let arguments = self.arguments(&terms, at);
        let rank = at.len() - arguments.len();
        let key = (definition, at[rank..].to_vec());
        let known = self.results.borrow().get(&key).cloned();
        let tensor = known.unwrap_or_else(|| {
            let types = &self.types[op.name()];
            let elements =
                operands.iter().map(|(term, sizes)| self.elements(*term, sizes, &arguments));
            let mut elements: Vec<(Vec<usize>, Vec<f64>)> = elements.collect();
            // The statistics are given one by one.
            if let Op::Unscale(_) | Op::RoundStats = op {
                let rest = elements.split_off(elements.len() + 1 - types.len());
                let statistics: Vec<f64> = elements.into_iter().flat_map(|(_, x)| x).collect();
                elements = [vec![(vec![statistics.len()], statistics)], rest].concat();
            }
            let operands = elements.into_iter().zip(types).map(|((sizes, elements), dtype)| {
                let data = match dtype.is_float() {
                    true => TensorData::Float(elements),
                    false => TensorData::Int(elements.into_iter().map(|x| x as i64).collect()),
                };
                Tensor::exact(TensorType::new(*dtype, sizes), data)
            });
            let operands: Vec<Tensor> = operands.collect();
            let operands: Vec<&Tensor> = operands.iter().collect();
            let mut results = eval_op(op, &operands, Options::EXACT).expect("evaluates");
            Rc::new(results.swap_remove(result))
        });
        self.results.borrow_mut().insert(key, tensor.clone());
        let sizes = tensor.shape().dims();
        let place = sizes.iter().zip(at).fold(0, |place, (n, ix)| place * *n as i64 + ix);
        tensor.to_f64s()[place as usize]
    }

    /// All elements of a value over its axes.
    pub(super) fn elements(&self, term: TermId, sizes: &[usize], others: &Values) -> Leaf {
        let extents: Vec<u64> = sizes.iter().map(|n| *n as u64).collect();
        let elements = places(&extents).map(|place| {
            let axes =
                extents.iter().zip(place).enumerate().map(|(k, (&extent, ix))| {
                    (Var { kind: Kind::Axis, number: k as u32, extent }, ix)
                });
            self.of(term, &axes.chain(others.iter().copied()).collect())
        });
        (sizes.to_vec(), elements.collect())
    }

    fn apply(&self, function: &Function, x: &[f64]) -> f64 {
        let bound = |bits: u64| (bits != u64::MAX).then(|| f64::from_bits(bits));
        let [first, second] = function.attributes;
        match (function.name, x) {
            ("not_negative", &[x]) => f64::from(x >= 0.0),
            ("is_zero", &[x]) => f64::from(x == 0.0),
            ("clip", &[x]) => {
                let x = bound(first).map_or(x, |low| x.max(low));
                bound(second).map_or(x, |high| x.min(high))
            }
            ("is_inf", &[x]) => f64::from(x.is_infinite()),
            ("is not finite", &[x]) => f64::from(!x.is_finite()),
            ("to_integer", &[x]) if second == DType::U8 as u64 => f64::from(x as i64 as u8),
            ("to_integer", &[x]) if second == DType::I32 as u64 => f64::from(x as i64 as i32),
            ("float_of" | "of", &[x]) => x,
            ("times", &[x]) => x * f64::from_bits(first),
            ("to_the", &[x]) => x.powf(f64::from_bits(first)),
            ("large_sum", _) => x.iter().sum::<f64>() + f64::from_bits(first),
            ("large_product", _) => x.iter().product(),
            (WITH_INFINITY, &[x]) => {
                let bound = f64::from_bits(second);
                f64::from(match first {
                    f if f == CompareFn::Eq as u64 => x == bound,
                    f if f == CompareFn::Ge as u64 => x >= bound,
                    _ => x <= bound,
                })
            }
            (OPERATION, _) => {
                let (op, dtypes) = &self.t.functions[first as usize];
                let number =
                    |(x, dtype): (&f64, &DType)| Tensor::splat(TensorType::scalar(*dtype), *x);
                let operands: Vec<Tensor> = x.iter().zip(dtypes).map(number).collect();
                let operands: Vec<&Tensor> = operands.iter().collect();
                eval_op(op, &operands, Options::EXACT).expect("evaluates")[0].to_f64s()[0]
            }
            ("to_integer", &[x]) => x.trunc(),
            (name, _) => {
                let dtype = if self.integers { DType::I64 } else { DType::F64 };
                let number = |x: f64| Tensor::splat(TensorType::scalar(dtype), x);
                let unary = UnaryFn::ALL.iter().find(|f| f.name() == name).map(|f| Op::Unary(*f));
                let binary = BinaryFn::ALL.iter().find(|f| f.name() == name);
                let op = unary.or(binary.map(|f| Op::Binary(*f)));
                let op = op.unwrap_or_else(|| panic!("a function `{name}`"));
                // A slope is that of a cotangent of 1.
                let operands: Vec<Tensor> = match (binary, x) {
                    (Some(_), &[x]) => vec![number(1.0), number(x)],
                    _ => x.iter().map(|x| number(*x)).collect(),
                };
                let operands: Vec<&Tensor> = operands.iter().collect();
                eval_op(&op, &operands, Options::EXACT).expect("evaluates")[0].to_f64s()[0]
            }
        }
    }
}

/// All indices of these sizes, in order.
fn places(sizes: &[u64]) -> impl Iterator<Item = Vec<i64>> + '_ {
    let n: u64 = sizes.iter().product();
    (0..n).map(move |mut rest| {
        let mut place: Vec<i64> = sizes
            .iter()
            .rev()
            .map(|n| {
                let ix = rest % n;
                rest /= n;
                ix as i64
            })
            .collect();
        place.reverse();
        place
    })
}
