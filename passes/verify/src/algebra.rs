//! The normal form of arithmetic over the real numbers.
//!
//! Sums and products are flat, sorted and collected; a factor of a sum is multiplied into it, and of a sum that is a factor itself the
//! content is taken out. Roots and quotients are powers. Products of sums are not multiplied out. Truth values are 0 and 1, and their own
//! squares; of polynomials of them see `choice.rs`.
//!
//! Laws that hold only where values are defined are used as such: √x·√x = x, x/x = 1, ln eˣ = x. No value is a NaN.

use crate::index::{Affine, Atom, Ix};
use crate::term::{Algebra, Function, Number, SAME_NUMBER, Term, TermId, Terms};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A mask of this or less excludes: e to its power is 0 in f32.
pub(crate) const EXCLUDED: f64 = -1e4;

/// The sum of this and a score is this: −∞ does as well.
pub(crate) const LOWEST: f64 = -1e30;

/// Integers up to this are floats of 32 bits.
const EXACT: i64 = 1 << 24;

const LITERAL: &str = "literal";

/// A sum of numbers.
#[derive(Clone, Copy, Default)]
pub(crate) struct Total {
    pub(crate) sum: f64,
    /// The sum of their sizes.
    size: f64,
    /// Whether one of them is no whole number.
    rounds: bool,
}

impl Total {
    pub(crate) fn add(&mut self, x: f64) {
        *self = Total {
            sum: self.sum + x,
            size: self.size + x.abs(),
            rounds: self.rounds || x.fract() != 0.0,
        };
    }

    /// Whether nothing is left: exactly of whole numbers, else within rounding.
    pub(crate) fn cancels(self) -> bool {
        self.sum == 0.0 || self.rounds && self.sum.abs() <= SAME_NUMBER * self.size
    }
}

impl Terms {
    pub(crate) fn constant(&mut self, x: f64) -> TermId {
        let x = self.number(x);
        self.term(Term::Number(x))
    }

    /// A float of a graph: where bits are compared, a function without operands, so that nothing is computed with it.
    pub(crate) fn literal(&mut self, x: f64) -> TermId {
        if self.algebra != Algebra::Bits || x.to_bits() == 0 || x == 1.0 {
            return self.constant(x);
        }
        let bits = if x.is_nan() { f64::NAN } else { x }.to_bits();
        self.term(Term::Apply(Function { name: LITERAL, attributes: [bits, 0] }, [].into()))
    }

    /// The value of a term that is a number or a literal.
    pub(crate) fn literal_value(&self, id: TermId) -> Option<f64> {
        match self.get(id) {
            Term::Apply(Function { name: LITERAL, attributes }, _) => {
                Some(f64::from_bits(attributes[0]))
            }
            _ => self.as_number(id),
        }
    }

    /// The value of a term that is a number.
    pub(crate) fn as_number(&self, id: TermId) -> Option<f64> {
        match self.get(id) {
            Term::Number(x) => Some(x.value()),
            _ => None,
        }
    }

    /// An index as a number.
    pub(crate) fn index_term(&mut self, ix: Ix) -> TermId {
        let Affine { atoms, constant } = self.affine(ix).clone();
        let mut parts = vec![];
        for (atom, factor) in atoms {
            let term = match atom {
                Atom::Data(term) => term,
                _ => {
                    let ix = self.atom(atom);
                    self.term(Term::Index(ix))
                }
            };
            parts.push((term, factor as f64));
        }
        self.sum(&parts, constant as f64)
    }

    /// A whole number as an index.
    pub(crate) fn as_index(&mut self, id: TermId) -> Ix {
        match self.whole(id) {
            Some(ix) => ix,
            None => self.atom(Atom::Data(id)),
        }
    }

    /// The index that a term is, if it is arithmetic of indices alone.
    fn whole(&mut self, id: TermId) -> Option<Ix> {
        let term = self.get(id).clone();
        let integer = |x: Number| {
            (x.value().fract() == 0.0 && x.value().abs() < 1e15).then(|| x.value() as i64)
        };
        match term {
            Term::Number(x) => integer(x).map(|x| self.constant_index(x)),
            Term::Index(ix) => Some(ix),
            Term::Sum(parts, constant) => {
                let mut sum = self.constant_index(integer(constant)?);
                for (part, factor) in parts.iter() {
                    let part = match self.get(*part) {
                        Term::Index(ix) => *ix,
                        _ => return None,
                    };
                    let part = self.times(part, integer(*factor)?);
                    sum = self.plus(sum, part);
                }
                Some(sum)
            }
            _ => None,
        }
    }

    /// Σ factor·term + constant.
    pub(crate) fn sum(&mut self, parts: &[(TermId, f64)], constant: f64) -> TermId {
        if let Some(none) = self.exhausted() {
            return none;
        }
        let is_multiple = parts.len() == 1 && constant == 0.0;
        let (sum, total, largest) = self.collected(parts, constant);
        if total.size.is_infinite() {
            return self.constant(total.sum);
        }
        if let Some(sum) = self.large_sum(parts, constant, largest) {
            return sum;
        }
        let constant = if total.cancels() { 0.0 } else { total.sum };
        let is_alone = sum.len() == 1 && constant == 0.0;
        if !is_multiple && !is_alone && sum.iter().any(|(t, _)| self.truths_of(*t).has_polynomial) {
            return self.sum_of_choices(sum, constant);
        }
        self.sum_of_parts(sum, constant)
    }

    /// The parts of a sum, flat, sorted and without those that cancel, its constant, and a bound of the numbers on the way.
    pub(crate) fn collected(
        &mut self,
        parts: &[(TermId, f64)],
        constant: f64,
    ) -> (Vec<(TermId, Number)>, Total, f64) {
        // Of each term the sum of its factors, and of their sizes.
        let mut collected: BTreeMap<TermId, Total> = BTreeMap::new();
        let mut total = Total::default();
        total.add(constant);
        for &(part, factor) in parts {
            if factor == 0.0 {
                continue;
            }
            match self.get(part) {
                Term::Number(x) => total.add(factor * x.value()),
                Term::Sum(inner, c) => {
                    total.add(factor * c.value());
                    for (t, f) in inner.iter() {
                        collected.entry(*t).or_default().add(factor * f.value());
                    }
                }
                _ => collected.entry(part).or_default().add(factor),
            }
        }
        let largest = collected.values().map(|x| x.size).fold(total.size, f64::max);
        let mut sum: Vec<(TermId, Number)> = vec![];
        for (term, factor) in collected {
            if !factor.cancels() {
                let factor = self.number(factor.sum);
                sum.push((term, factor));
            }
        }
        (sum, total, largest)
    }

    /// The sum of parts that are in normal form together.
    pub(crate) fn sum_of_parts(&mut self, sum: Vec<(TermId, Number)>, constant: f64) -> TermId {
        match (&sum[..], constant) {
            ([], _) => self.constant(constant),
            (&[(term, Number::ONE)], 0.0) => term,
            _ => {
                let constant = self.number(constant);
                self.term(Term::Sum(sum.into(), constant))
            }
        }
    }

    pub(crate) fn add(&mut self, a: TermId, b: TermId) -> TermId {
        self.sum(&[(a, 1.0), (b, 1.0)], 0.0)
    }

    pub(crate) fn sub(&mut self, a: TermId, b: TermId) -> TermId {
        self.sum(&[(a, 1.0), (b, -1.0)], 0.0)
    }

    pub(crate) fn scale(&mut self, a: TermId, factor: f64) -> TermId {
        self.sum(&[(a, factor)], 0.0)
    }

    /// A number and a term whose product this is.
    pub(crate) fn content(&mut self, id: TermId) -> (f64, TermId) {
        let (parts, constant) = match self.get(id) {
            Term::Number(x) => {
                let x = x.value();
                return (x, self.constant(1.0));
            }
            Term::Sum(parts, constant) => (parts.clone(), *constant),
            _ => return (1.0, id),
        };
        if let (&[(term, factor)], Number::ZERO) = (&parts[..], constant) {
            return (factor.value(), term);
        }
        if self.is_truth(id) {
            return (1.0, id);
        }
        let largest =
            parts.iter().map(|(_, f)| f.value().abs()).fold(constant.value().abs(), f64::max);
        let size = self.common_divisor(id, &parts, constant).unwrap_or(largest);
        // The sign does not depend on the names of variables: parts are weighted by their shapes.
        let weight = |t: TermId| 1.0 + (self.shape_of(t) >> 12) as f64 / (1_u64 << 52) as f64;
        let balance: f64 =
            parts.iter().map(|(t, f)| f.value() * weight(*t)).sum::<f64>() + constant.value();
        let size = if balance < -1e-9 * largest { -size } else { size };
        let rest = self.sum_divided(&parts, constant, size);
        // A truth is what it is.
        if self.truths_of(rest).is_polynomial && !self.is_truth(rest) {
            let opposite = self.sum_divided(&parts, constant, -size);
            if self.is_truth(opposite) {
                return (-size, opposite);
            }
        }
        (size, rest)
    }

    /// A sum whose numbers are divided: integers without a remainder, and so without rounding.
    fn sum_divided(&mut self, parts: &[(TermId, Number)], constant: Number, by: f64) -> TermId {
        let parts = parts.iter().map(|(t, f)| (*t, self.number(f.value() / by))).collect();
        self.sum_of_parts(parts, constant.value() / by)
    }

    /// Π termᵉ.
    pub(crate) fn product(&mut self, factors: &[(TermId, f64)]) -> TermId {
        if let Some(none) = self.exhausted() {
            return none;
        }
        // Of each factor the sum of its exponents, and of their sizes.
        let mut exponents: BTreeMap<TermId, Total> = BTreeMap::new();
        let mut number = 1.0;
        let mut open: Vec<(TermId, f64)> = factors.to_vec();
        while let Some((factor, exponent)) = open.pop() {
            if exponent == 0.0 {
                continue;
            }
            if let Some((power, other)) = self.turned(factor) {
                open.extend([(power, exponent), (other, exponent)]);
                continue;
            }
            match self.get(factor).clone() {
                Term::Product(inner) if exponent.fract() == 0.0 || self.all_positive(&inner) => {
                    open.extend(inner.iter().map(|(t, e)| (*t, e.value() * exponent)));
                }
                // A truth is its own root.
                Term::Product(inner)
                    if exponent > 0.0 && inner.iter().any(|f| self.is_truth_factor(f)) =>
                {
                    let (truths, others): (Vec<_>, Vec<_>) =
                        inner.iter().partition(|f| self.is_truth_factor(f));
                    open.extend(truths.into_iter().map(|(t, _)| (t, 1.0)));
                    if !others.is_empty() {
                        open.push((self.some_of(&others), exponent));
                    }
                }
                Term::Number(x) if x.value().powf(exponent).is_finite() => {
                    number *= x.value().powf(exponent);
                }
                Term::Sum(..) => {
                    let (content, rest) = match self.content(factor) {
                        (1.0, _) => self.shortened(factor),
                        other => other,
                    };
                    if rest == factor || (content < 0.0 && exponent.fract() != 0.0) {
                        exponents.entry(factor).or_default().add(exponent);
                    } else {
                        number *= content.powf(exponent);
                        open.push((rest, exponent));
                    }
                }
                _ => exponents.entry(factor).or_default().add(exponent),
            }
        }
        let kept = exponents.into_iter().filter(|(_, exponent)| !exponent.cancels());
        let mut collected: BTreeMap<TermId, f64> = kept.map(|(t, total)| (t, total.sum)).collect();
        if number == 0.0 {
            return self.constant(0.0);
        }
        number *= self.multiply_polynomials(&mut collected);
        if number == 0.0 {
            return self.constant(0.0);
        }
        if let Some(product) = self.large_product(factors, number) {
            return product;
        }
        let mut product: Vec<(TermId, Number)> = vec![];
        for (term, exponent) in collected {
            let exponent = self.number(exponent);
            product.push((term, exponent));
        }
        let term = match &product[..] {
            [] => return self.constant(number),
            _ => self.some_of(&product),
        };
        self.scale(term, number)
    }

    pub(crate) fn mul(&mut self, a: TermId, b: TermId) -> TermId {
        self.product(&[(a, 1.0), (b, 1.0)])
    }

    pub(crate) fn power(&mut self, a: TermId, exponent: f64) -> TermId {
        self.product(&[(a, exponent)])
    }

    fn all_positive(&self, factors: &[(TermId, Number)]) -> bool {
        let positive = |t: TermId| match self.get(t) {
            Term::Apply(f, _) => f.name == "exp",
            _ => false,
        };
        factors.iter().all(|(t, e)| positive(*t) || e.value().fract() != 0.0)
    }

    pub(crate) fn apply(&mut self, name: &'static str, operands: &[TermId]) -> TermId {
        self.function(Function { name, attributes: [0; 2] }, operands)
    }

    /// A function of elements that has no law.
    pub(crate) fn function(&mut self, function: Function, operands: &[TermId]) -> TermId {
        if self.algebra == Algebra::Bits {
            return self.term(Term::Apply(function, operands.into()));
        }
        let operand = |x: &TermId| {
            let x = self.polynomial(*x);
            let (factor, x) = self.shortened(x);
            self.scale(x, factor)
        };
        let operands: Rc<[TermId]> = operands.iter().map(operand).collect();
        self.term(Term::Apply(function, operands))
    }

    /// x·(1 + a·x²) multiplied out to x + a·x³, as every polynomial of what is a factor besides: GELU is written as both.
    pub(crate) fn polynomial(&mut self, id: TermId) -> TermId {
        match self.get(id).clone() {
            Term::Sum(parts, constant) => {
                let parts: Vec<(TermId, f64)> =
                    parts.iter().map(|(t, f)| (self.polynomial(*t), f.value())).collect();
                self.sum(&parts, constant.value())
            }
            Term::Product(factors) => {
                let found = factors.iter().enumerate().find_map(|(n, (factor, exponent))| {
                    let Term::Sum(parts, constant) = self.get(*factor) else { return None };
                    let mut others = factors.to_vec();
                    others.remove(n);
                    let power = |t: TermId, e: Number| {
                        let whole = |e: Number| e.value() > 0.0 && e.value().fract() == 0.0;
                        whole(e) && others.iter().any(|(other, e)| *other == t && whole(*e))
                    };
                    let of_others = parts.iter().all(|(t, _)| match self.get(*t) {
                        Term::Product(factors) => factors.iter().all(|(t, e)| power(*t, *e)),
                        _ => power(*t, Number::ONE),
                    });
                    (*exponent == Number::ONE && of_others)
                        .then(|| (parts.to_vec(), constant.value(), others))
                });
                let Some((parts, constant, others)) = found else { return id };
                let others: Vec<(TermId, f64)> =
                    others.iter().map(|(t, e)| (*t, e.value())).collect();
                let others = self.product(&others);
                let mut sum = vec![(others, constant)];
                for (part, factor) in parts {
                    sum.push((self.mul(part, others), factor.value()));
                }
                let sum = self.sum(&sum, 0.0);
                self.polynomial(sum)
            }
            _ => id,
        }
    }

    pub(crate) fn exp(&mut self, a: TermId) -> TermId {
        let (parts, constant) = match self.get(a).clone() {
            Term::Number(x) => (vec![], x.value()),
            Term::Sum(parts, constant) => (parts.to_vec(), constant.value()),
            _ => (vec![(a, Number::ONE)], 0.0),
        };
        if constant <= EXCLUDED && (parts.is_empty() || constant == f64::NEG_INFINITY) {
            return self.constant(0.0);
        }
        // A factor that is no number in f64: nothing is taken out.
        if !constant.exp().is_normal() {
            return self.apply("exp", &[a]);
        }
        let mut written: Vec<(TermId, f64)> = vec![];
        for (part, factor) in parts {
            match self.written_as_sum(part, |_, _| true) {
                Some(inner) => written.extend(inner.iter().map(|(t, f)| (*t, f * factor.value()))),
                None => written.push((part, factor.value())),
            }
        }
        let mut factors = vec![];
        for (part, factor) in written {
            let power = match self.get(part).clone() {
                // e to the power of a choice is a choice of powers.
                Term::Apply(f, operands) if f.name == "select" => {
                    let &[condition, a, b] = &operands[..] else { continue };
                    let (a, b) = (self.scale(a, factor), self.scale(b, factor));
                    let (a, b) = (self.exp(a), self.exp(b));
                    factors.push((self.select(condition, a, b), 1.0));
                    continue;
                }
                Term::Apply(f, operands) if f.name == "log" => operands[0],
                _ => self.apply("exp", &[part]),
            };
            factors.push((power, factor));
        }
        factors.push((self.constant(constant.exp()), 1.0));
        let product = self.product(&factors);
        self.with_one_mask(product)
    }

    /// 1 + e⁻ˣ as e⁻ˣ and 1 + eˣ, of which the second is the one that is written.
    fn turned(&mut self, id: TermId) -> Option<(TermId, TermId)> {
        let power = self.one_more_than_power(id)?;
        let Term::Product(factors) = self.get(power).clone() else { return None };
        let shape = |t: &Terms, (x, _): &(TermId, Number)| t.shape_of(*x);
        let (first, exponent) =
            factors.iter().map(|f| (shape(self, f), f.1.value())).min_by_key(|(s, _)| *s)?;
        // Of exponents that look alike none is the first.
        let is_alone = factors.iter().filter(|f| shape(self, f) == first).count() == 1;
        if exponent > 0.0 || !is_alone {
            return None;
        }
        let inverse = self.power(power, -1.0);
        Some((power, self.sum(&[(inverse, 1.0)], 1.0)))
    }

    /// The power of e that a sum is 1 more than.
    fn one_more_than_power(&self, id: TermId) -> Option<TermId> {
        let Term::Sum(parts, Number::ONE) = self.get(id) else { return None };
        let &[(power, Number::ONE)] = &parts[..] else { return None };
        let is_exp = |t: TermId| matches!(self.get(t), Term::Apply(f, _) if f.name == "exp");
        let is_power = match self.get(power) {
            Term::Product(factors) => factors.iter().all(|(t, _)| is_exp(*t)),
            _ => is_exp(power),
        };
        is_power.then_some(power)
    }

    /// The logarithm of c − c·p/q, where q is 1 more than a power of e and q − p a number or this power, as that of its numerator less that
    /// of q.
    fn log_of_complement(&mut self, id: TermId) -> Option<TermId> {
        let Term::Sum(parts, constant) = self.get(id).clone() else { return None };
        let (&[(part, factor)], c) = (&parts[..], constant.value()) else { return None };
        let Term::Product(factors) = self.get(part).clone() else { return None };
        let below = factors
            .iter()
            .find(|(t, e)| e.value() == -1.0 && self.one_more_than_power(*t).is_some());
        let &(below, _) = below.filter(|_| c > 0.0 && factor.value() == -c)?;
        let above = self.mul(part, below);
        let rest = self.sub(below, above);
        let of_rest = match self.as_number(rest) {
            Some(x) if x > 0.0 => self.constant(x.ln()),
            None if self.one_more_than_power(below) == Some(rest) => self.log(rest),
            _ => return None,
        };
        let log = self.log(below);
        Some(self.sum(&[(of_rest, 1.0), (log, -1.0)], c.ln()))
    }

    pub(crate) fn log(&mut self, a: TermId) -> TermId {
        if let Some((power, other)) = self.turned(a) {
            let (power, other) = (self.log(power), self.log(other));
            return self.add(power, other);
        }
        if let Some(log) = self.log_of_complement(a) {
            return log;
        }
        let (content, rest) = self.content(a);
        if content <= 0.0 {
            return self.apply("log", &[a]);
        }
        let factors = match self.get(rest).clone() {
            Term::Product(factors) => factors.to_vec(),
            _ => vec![(rest, Number::ONE)],
        };
        let mut parts = vec![];
        for (factor, exponent) in factors {
            // Even powers are also those of negative numbers.
            let is_even = exponent.value() % 2.0 == 0.0;
            let (log, exponent) = match self.get(factor).clone() {
                // An infinity.
                Term::Number(_) => return self.apply("log", &[a]),
                Term::Apply(f, operands) if f.name == "exp" => (operands[0], exponent.value()),
                _ if is_even && !self.all_positive(&[(factor, exponent)]) => {
                    let power = self.power(factor, exponent.value());
                    (self.apply("log", &[power]), 1.0)
                }
                _ => (self.apply("log", &[factor]), exponent.value()),
            };
            parts.push((log, exponent));
        }
        self.sum(&parts, content.ln())
    }

    /// The float that an integer is cast to: the same real number, but rounded, so comparisons of both may differ. Constants and the
    /// indices of axes are exact.
    pub(crate) fn float_of(&mut self, a: TermId) -> TermId {
        let exact = |t: &Terms, ix: Ix| {
            let (low, high) = t.range(ix);
            -EXACT <= low && high <= EXACT
        };
        match self.get(a).clone() {
            Term::Number(_) => a,
            Term::Index(ix) if exact(self, ix) => a,
            _ if self.is_truth(a) => a,
            Term::Sum(parts, constant) => {
                let parts: Vec<(TermId, f64)> =
                    parts.iter().map(|(t, f)| (self.float_of(*t), f.value())).collect();
                self.sum(&parts, constant.value())
            }
            Term::Product(factors) if factors.iter().any(|f| self.is_choice_factor(f)) => {
                let (choices, others): (Vec<_>, Vec<_>) =
                    factors.iter().partition(|f| self.is_choice_factor(f));
                if others.is_empty() {
                    return a;
                }
                let (choices, others) = (self.some_of(&choices), self.some_of(&others));
                let others = self.float_of(others);
                self.mul(choices, others)
            }
            _ => self.apply("float_of", &[a]),
        }
    }

    /// 1 − a, of a truth value.
    pub(crate) fn not(&mut self, a: TermId) -> TermId {
        self.sum(&[(a, -1.0)], 1.0)
    }

    /// `a` where the condition is 1, else `b`.
    pub(crate) fn select(&mut self, condition: TermId, a: TermId, b: TermId) -> TermId {
        if a == b {
            return a;
        }
        match self.as_number(condition) {
            Some(0.0) => return b,
            Some(_) => return a,
            None => {}
        }
        // One of both polarities.
        if let Term::Sum(parts, Number::ONE) = self.get(condition).clone()
            && let &[(negated, _)] = &parts[..]
        {
            return self.select(negated, b, a);
        }
        let excluded =
            |t: &Terms, x: TermId| t.as_number(x).is_some_and(|x| x <= EXCLUDED || x.is_infinite());
        if self.algebra != Algebra::Bits && (excluded(self, a) || excluded(self, b)) {
            let lowest = self.constant(f64::NEG_INFINITY);
            let low = |t: &Terms, x: TermId| {
                if t.as_number(x).is_some_and(|x| x <= LOWEST) { lowest } else { x }
            };
            let (a, b) = (low(self, a), low(self, b));
            return self.apply("select", &[condition, a, b]);
        }
        self.choice(condition, a, b)
    }

    /// The sum of `a` where a truth value is 1, and `b` where it is 0.
    pub(crate) fn choice(&mut self, truth: TermId, a: TermId, b: TermId) -> TermId {
        let not = self.not(truth);
        let (a, b) = (self.mul(truth, a), self.mul(not, b));
        self.add(a, b)
    }

    /// 1 where a ≥ 0, else 0.
    pub(crate) fn not_negative(&mut self, a: TermId) -> TermId {
        if let Some(x) = self.as_number(a) {
            return self.constant(f64::from(x >= 0.0));
        }
        if let Some(ix) = self.whole(a) {
            return self.index_not_negative(ix);
        }
        let (content, rest) = self.content(a);
        let a = self.scale(rest, content.signum());
        self.apply("not_negative", &[a])
    }

    pub(crate) fn index_not_negative(&mut self, ix: Ix) -> TermId {
        let (low, high) = self.range(ix);
        if low >= 0 || high < 0 {
            return self.constant(f64::from(low >= 0));
        }
        // i + c ≥ 0 or −i − c − 1 ≥ 0: of the one and the other the constant is not negative in one.
        if self.affine(ix).constant < 0 {
            let opposite = self.times(ix, -1);
            let opposite = self.offset(opposite, -1);
            let opposite = self.term(Term::NotNegative(opposite));
            return self.not(opposite);
        }
        self.term(Term::NotNegative(ix))
    }

    pub(crate) fn is_zero(&mut self, a: TermId) -> TermId {
        if let Some(x) = self.as_number(a) {
            return self.constant(f64::from(x == 0.0));
        }
        if let Some(ix) = self.whole(a) {
            let (low, high) = self.range(ix);
            if low > 0 || high < 0 {
                return self.constant(0.0);
            }
            // i = 0: i ≥ 0 and −i ≥ 0.
            let opposite = self.times(ix, -1);
            let (a, b) = (self.index_not_negative(ix), self.index_not_negative(opposite));
            return self.mul(a, b);
        }
        let (_, a) = self.content(a);
        self.apply("is_zero", &[a])
    }
}
