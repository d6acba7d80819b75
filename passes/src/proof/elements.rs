//! Functions of elements, in three readings.

use super::encode::Encoder;
use super::pattern::ANY;
use easy_smt::SExpr;
use frit_ir::ops::{BinaryFn, CompareFn, LogicalFn, ReduceFn, UnaryFn};
use frit_ir::{DType, Op, Tensor, ValueId};
use std::collections::HashMap;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, SQRT_2};

/// What the elements of tensors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Elements {
    /// Anything: casts and functions are uninterpreted; of multiplication it is known that it commutes.
    Any,
    /// Bit-vector floats, rounded to nearest even, and bit-vector integers.
    Floats,
    /// Real numbers; exp, ln, √ and 1/x are uninterpreted functions with some of their laws, others without.
    Reals,
}

/// What is known of terms of the reals.
#[derive(Default)]
pub(super) struct Facts {
    /// `a · (1/b)`, with a and b.
    quotients: HashMap<SExpr, (SExpr, SExpr)>,
    /// `exp(x)`, with x.
    exponentials: HashMap<SExpr, SExpr>,
    /// Arguments of ln, with the results.
    logarithms: Vec<(SExpr, SExpr)>,
}

/// Exponent and significand bits.
fn format(dtype: DType) -> [u64; 2] {
    match dtype {
        DType::F64 => [11, 53],
        DType::F32 => [8, 24],
        DType::F16 => [5, 11],
        DType::BF16 => [8, 8],
        DType::F8E5M2 => [5, 3],
        other => panic!("{other} is no IEEE float"),
    }
}

fn width(dtype: DType) -> u64 {
    dtype.size() as u64 * 8
}

impl Encoder<'_> {
    pub(super) fn sort(&self, dtype: DType) -> SExpr {
        match (self.elements, dtype) {
            (_, DType::Bool) => self.smt.bool_sort(),
            (Elements::Floats, d) if d.is_float() => self.indexed("FloatingPoint", &format(d)),
            (Elements::Floats, d) => self.indexed("BitVec", &[width(d)]),
            (_, d) if !d.is_float() => self.smt.int_sort(),
            (Elements::Reals, _) => self.smt.real_sort(),
            (Elements::Any, d) => self.smt.atom(format!("Element_{}", d.name())),
        }
    }

    /// `(_ name n …)`.
    fn indexed(&self, name: &str, numbers: &[u64]) -> SExpr {
        let numbers = numbers.iter().map(|n| self.smt.numeral(*n));
        self.smt
            .list([self.smt.atom("_"), self.smt.atom(name)].into_iter().chain(numbers).collect())
    }

    /// `((_ name n …) x …)`.
    fn apply_indexed(&self, name: &str, numbers: &[u64], arguments: &[SExpr]) -> SExpr {
        self.smt.list([&[self.indexed(name, numbers)], arguments].concat())
    }

    fn rne(&self) -> SExpr {
        self.smt.atom("RNE")
    }

    /// A known element.
    pub(super) fn number(&mut self, dtype: DType, x: f64) -> SExpr {
        match (self.elements, dtype) {
            (_, DType::Bool) => self.smt.atom(if x != 0.0 { "true" } else { "false" }),
            (Elements::Floats, d) if d.is_float() => {
                let sign = if x.is_sign_negative() { "-" } else { "+" };
                match x {
                    x if x.is_nan() => self.indexed("NaN", &format(d)),
                    x if x.is_infinite() => self.indexed(&format!("{sign}oo"), &format(d)),
                    0.0 => self.indexed(&format!("{sign}zero"), &format(d)),
                    x => {
                        let real = self.real(x);
                        self.apply_indexed("to_fp", &format(d), &[self.rne(), real])
                    }
                }
            }
            (Elements::Floats, d) => {
                let mask = u64::MAX >> (64 - width(d));
                self.indexed(&format!("bv{}", x as i64 as u64 & mask), &[width(d)])
            }
            (_, d) if !d.is_float() => self.int(x as i64),
            (Elements::Reals, _) => self.real(x),
            (Elements::Any, d) => {
                let sort = self.sort(d);
                self.constant(&format!("{} {:x}", d.name(), x.to_bits()), sort)
            }
        }
    }

    /// A real number; irrational ones that composites have are told by their first digits.
    fn real(&mut self, x: f64) -> SExpr {
        let real = self.smt.real_sort();
        let near = |y: f64| (x - y).abs() < 1e-6;
        if self.elements == Elements::Reals && (near(FRAC_1_SQRT_2) || near(SQRT_2)) {
            let root = self.constant("root of 1/2", real);
            let two = self.smt.atom("2.0");
            return if near(SQRT_2) { self.apply("*", &[two, root]) } else { root };
        }
        if self.elements == Elements::Reals && near(FRAC_2_PI.sqrt()) {
            return self.constant("root of 2/pi", real);
        }
        // Scalars of a model have at most the digits of an f32.
        let digits = format!("{}", x.abs() as f32);
        let magnitude = if digits.contains('.') { digits } else { digits + ".0" };
        let magnitude = self.smt.atom(magnitude);
        if x < 0.0 { self.apply("-", &[magnitude]) } else { magnitude }
    }

    pub(super) fn function_of_elements(&mut self, v: ValueId, x: &[SExpr]) -> SExpr {
        let graph = self.graph;
        let node = graph.def(v);
        let dtype = self.dtype(v);
        let from = node.inputs.last().map_or(dtype, |x| self.dtype(*x));
        match &node.op {
            Op::Constant(c) => {
                let value = c.value.as_splat().expect("constants of rules have equal elements");
                match value == ANY {
                    true => self.constant(&format!("any {}", dtype.name()), self.sort(dtype)),
                    false => self.number(dtype, value),
                }
            }
            Op::Select => self.apply("ite", x),
            Op::Logical(f) if dtype == DType::Bool => {
                let name = match f {
                    LogicalFn::And => "and",
                    LogicalFn::Or => "or",
                    LogicalFn::Xor => "xor",
                };
                self.apply(name, x)
            }
            Op::Unary(UnaryFn::Not) if dtype == DType::Bool => self.apply("not", x),
            Op::Cast(_) if from == dtype => x[0],
            op => match self.elements {
                Elements::Any => self.uninterpreted(v, x),
                Elements::Floats => self.of_floats(op, from, dtype, x),
                Elements::Reals => self.of_reals(v, x),
            },
        }
    }

    /// The operation as a function of which nothing is known.
    fn uninterpreted(&mut self, v: ValueId, x: &[SExpr]) -> SExpr {
        let graph = self.graph;
        let node = graph.def(v);
        let result = self.sort(self.dtype(v));
        let types: Vec<&str> = node.inputs.iter().map(|i| graph.ty(*i).dtype.name()).collect();
        let sorts: Vec<SExpr> = node.inputs.iter().map(|i| self.sort(self.dtype(*i))).collect();
        let name = format!("{:?} of {}", node.op, types.join(" "));
        let arguments: Vec<(SExpr, SExpr)> = x.iter().copied().zip(sorts).collect();
        self.function(&name, &arguments, result)
    }

    fn of_floats(&mut self, op: &Op, from: DType, to: DType, x: &[SExpr]) -> SExpr {
        let float = from.is_float();
        match op {
            Op::Unary(UnaryFn::Neg) => self.apply(if float { "fp.neg" } else { "bvneg" }, x),
            Op::Unary(UnaryFn::Not) => self.apply("bvnot", x),
            Op::Binary(f) => {
                let name = match (f, float) {
                    (BinaryFn::Add, true) => "fp.add",
                    (BinaryFn::Sub, true) => "fp.sub",
                    (BinaryFn::Mul, true) => "fp.mul",
                    (BinaryFn::Div, true) => "fp.div",
                    (BinaryFn::Add, false) => "bvadd",
                    (BinaryFn::Sub, false) => "bvsub",
                    (BinaryFn::Mul, false) => "bvmul",
                    (BinaryFn::Div, false) => "bvsdiv",
                    (f, _) => panic!("{} is not read as a function of bits", f.name()),
                };
                let mode = float.then(|| self.rne());
                self.apply(name, &mode.into_iter().chain(x.iter().copied()).collect::<Vec<_>>())
            }
            Op::Compare(f @ (CompareFn::Eq | CompareFn::Ne)) => {
                let equal = self.apply(if float { "fp.eq" } else { "=" }, x);
                if *f == CompareFn::Eq { equal } else { self.apply("not", &[equal]) }
            }
            Op::Logical(f) => {
                let name = match f {
                    LogicalFn::And => "bvand",
                    LogicalFn::Or => "bvor",
                    LogicalFn::Xor => "bvxor",
                };
                self.apply(name, x)
            }
            Op::Cast(_) => self.cast(from, to, x[0]),
            op => panic!("{} is not read as a function of bits", op.name()),
        }
    }

    fn cast(&mut self, from: DType, to: DType, x: SExpr) -> SExpr {
        let to_width = || width(to);
        match (from, to) {
            (DType::Bool, _) => {
                let (one, zero) = (self.number(to, 1.0), self.number(to, 0.0));
                self.apply("ite", &[x, one, zero])
            }
            (_, DType::Bool) if from.is_float() => {
                self.apply("not", &[self.apply("fp.isZero", &[x])])
            }
            (_, DType::Bool) => {
                let zero = self.number(from, 0.0);
                self.apply("not", &[self.apply("=", &[x, zero])])
            }
            _ if from.is_float() && to.is_float() => {
                self.apply_indexed("to_fp", &format(to), &[self.rne(), x])
            }
            // Out of range the result is unspecified here, so that nothing follows from it.
            _ if from.is_float() => {
                let name = if to == DType::U8 { "fp.to_ubv" } else { "fp.to_sbv" };
                self.apply_indexed(name, &[to_width()], &[self.smt.atom("RTZ"), x])
            }
            _ if to.is_float() => {
                let name = if from == DType::U8 { "to_fp_unsigned" } else { "to_fp" };
                self.apply_indexed(name, &format(to), &[self.rne(), x])
            }
            _ if width(to) <= width(from) => {
                self.apply_indexed("extract", &[to_width() - 1, 0], &[x])
            }
            _ => {
                let name = if from == DType::U8 { "zero_extend" } else { "sign_extend" };
                self.apply_indexed(name, &[to_width() - width(from)], &[x])
            }
        }
    }

    /// The larger or smaller, as the interpreter chooses: `next` unless the one so far is beyond it or NaN.
    pub(super) fn extreme(&mut self, f: ReduceFn, dtype: DType, x: SExpr) -> SExpr {
        let max = f == ReduceFn::Max;
        if !dtype.is_float() {
            let least = match (max, dtype) {
                (true, DType::I32) => f64::from(i32::MIN),
                (false, DType::I32) => f64::from(i32::MAX),
                (true, _) => i64::MIN as f64,
                (false, _) => i64::MAX as f64,
            };
            let first = self.number(dtype, least);
            let beyond = self.apply(if max { "bvsgt" } else { "bvslt" }, &[first, x]);
            return self.apply("ite", &[beyond, first, x]);
        }
        let start = if max { f64::NEG_INFINITY } else { f64::INFINITY };
        let first = self.number(dtype, start);
        let beyond = self.apply(if max { "fp.gt" } else { "fp.lt" }, &[first, x]);
        let stays = self.apply("or", &[beyond, self.apply("fp.isNaN", &[first])]);
        self.apply("ite", &[stays, first, x])
    }

    fn of_reals(&mut self, v: ValueId, x: &[SExpr]) -> SExpr {
        let graph = self.graph;
        let node = graph.def(v);
        let known = |i: usize| graph.constant(node.inputs[i]).and_then(Tensor::as_splat);
        match &node.op {
            // Rounding is left out.
            Op::Cast(_) if self.dtype(node.inputs[0]).is_float() => x[0],
            Op::Binary(BinaryFn::Add) => self.apply("+", x),
            Op::Binary(BinaryFn::Sub) => self.apply("-", x),
            Op::Binary(BinaryFn::Mul) => self.apply("*", x),
            Op::Binary(BinaryFn::Div) => match known(1) {
                Some(c) => {
                    let factor = self.real(1.0 / c);
                    self.apply("*", &[x[0], factor])
                }
                None => self.quotient(x[0], x[1]),
            },
            Op::Binary(BinaryFn::Pow) => match known(1) {
                Some(2.0) => self.apply("*", &[x[0], x[0]]),
                Some(3.0) => self.apply("*", &[x[0], x[0], x[0]]),
                Some(0.5) => self.root(x[0]),
                Some(-0.5) => self.inverse_root(x[0]),
                other => panic!("the power {other:?} is not read over the reals"),
            },
            Op::Unary(f) => self.of_real(*f, x[0]),
            _ => self.uninterpreted(v, x),
        }
    }

    fn of_real(&mut self, f: UnaryFn, x: SExpr) -> SExpr {
        let one = self.smt.atom("1.0");
        let half = self.smt.atom("0.5");
        match f {
            UnaryFn::Neg => self.apply("-", &[x]),
            UnaryFn::Exp => self.exp(x),
            UnaryFn::Log => self.log(x),
            UnaryFn::Sqrt => self.root(x),
            UnaryFn::Rsqrt => self.inverse_root(x),
            UnaryFn::Reciprocal => self.quotient(one, x),
            UnaryFn::Sigmoid => {
                let (e, other) = (self.exp(x), self.exp(self.apply("-", &[x])));
                self.assert(self.apply("=", &[self.apply("*", &[e, other]), one]));
                self.quotient(one, self.apply("+", &[one, other]))
            }
            UnaryFn::Softplus => {
                let e = self.exp(x);
                self.log(self.apply("+", &[one, e]))
            }
            UnaryFn::Silu => {
                let gate = self.of_real(UnaryFn::Sigmoid, x);
                self.apply("*", &[x, gate])
            }
            UnaryFn::Gelu => {
                let root = self.real(FRAC_1_SQRT_2);
                let erf = self.real_function("erf", self.apply("*", &[x, root]));
                self.apply("*", &[half, x, self.apply("+", &[one, erf])])
            }
            UnaryFn::GeluTanh => {
                let (root, cubic) = (self.real(FRAC_2_PI.sqrt()), self.real(0.044715));
                let inner = self.apply("+", &[x, self.apply("*", &[cubic, x, x, x])]);
                let tanh = self.real_function("tanh", self.apply("*", &[root, inner]));
                self.apply("*", &[half, x, self.apply("+", &[one, tanh])])
            }
            other => self.real_function(other.name(), x),
        }
    }

    pub(super) fn real_function(&mut self, name: &str, x: SExpr) -> SExpr {
        let real = self.smt.real_sort();
        self.function(name, &[(x, real)], real)
    }

    /// exp(x) > 0.
    pub(super) fn exp(&mut self, x: SExpr) -> SExpr {
        let e = self.real_function("exp", x);
        self.assert(self.apply(">", &[e, self.smt.atom("0.0")]));
        self.facts.exponentials.insert(e, x);
        e
    }

    /// √x · √x = x of x ≥ 0.
    pub(super) fn root(&mut self, x: SExpr) -> SExpr {
        let root = self.real_function("sqrt", x);
        let zero = self.smt.atom("0.0");
        let square = self.apply("*", &[root, root]);
        let law = [self.apply(">=", &[root, zero]), self.apply("=", &[square, x])];
        let domain = self.apply(">=", &[x, zero]);
        self.assert(self.apply("=>", &[domain, self.apply("and", &law)]));
        root
    }

    pub(super) fn inverse_root(&mut self, x: SExpr) -> SExpr {
        let (one, root) = (self.smt.atom("1.0"), self.root(x));
        self.quotient(one, root)
    }

    /// a · (1/b), and b · (1/b) = 1 unless b = 0.
    pub(super) fn quotient(&mut self, a: SExpr, b: SExpr) -> SExpr {
        let inverse = self.real_function("inverse", b);
        let (zero, one) = (self.smt.atom("0.0"), self.smt.atom("1.0"));
        let law = self.apply("=", &[self.apply("*", &[b, inverse]), one]);
        self.assert(self.apply("or", &[self.apply("=", &[b, zero]), law]));
        if a == one {
            return inverse;
        }
        let quotient = self.apply("*", &[a, inverse]);
        self.facts.quotients.insert(quotient, (a, b));
        quotient
    }

    /// ln exp(x) = x, ln (a/b) = ln a − ln b, and ln a = −ln b if a·b = 1, of positive a and b.
    pub(super) fn log(&mut self, x: SExpr) -> SExpr {
        let log = self.real_function("log", x);
        if self.facts.logarithms.contains(&(x, log)) {
            return log;
        }
        let (zero, one) = (self.smt.atom("0.0"), self.smt.atom("1.0"));
        for (other, its) in self.facts.logarithms.clone() {
            let product = self.apply("=", &[self.apply("*", &[x, other]), one]);
            let domain = self.apply("and", &[self.apply(">", &[x, zero]), product]);
            let sum = self.apply("=", &[self.apply("+", &[log, its]), zero]);
            self.assert(self.apply("=>", &[domain, sum]));
        }
        self.facts.logarithms.push((x, log));
        if let Some(exponent) = self.facts.exponentials.get(&x) {
            self.assert(self.apply("=", &[log, *exponent]));
        }
        if let Some((a, b)) = self.facts.quotients.get(&x).copied() {
            let positive = [self.apply(">", &[a, zero]), self.apply(">", &[b, zero])];
            let difference = [self.log(a), self.log(b)];
            let law = self.apply("=", &[log, self.apply("-", &difference)]);
            self.assert(self.apply("=>", &[self.apply("and", &positive), law]));
        }
        log
    }
}
