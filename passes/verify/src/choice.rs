//! Polynomials of truth values as factors of products and parts of sums.
//!
//! A product keeps its polynomials of truth values as factors: multiplied out, (1 − a)·(1 − b)·… has a part for each set of truths. No
//! two of these factors have a truth in common, and none is itself a product, so that there is one way to write each. A sum in which
//! several terms meet is written out instead, as long as that has few parts: x·t + x·(1 − t) is x. Where all parts of what is left are
//! truths times the same term, the sum is a product again.

use crate::algebra::Total;
use crate::index::Atom;
use crate::integer::{Kind, WHOLE};
use crate::term::{Number, SAME_NUMBER, Term, TermId, Terms};
use std::collections::{BTreeMap, BTreeSet};

/// The coefficients of products of truths, which are in order and do not follow from each other.
pub(crate) type Polynomial = BTreeMap<Vec<TermId>, f64>;

/// A product of several polynomials that has more parts stays as it is within a sum.
const FEW: usize = 16;

/// Polynomials of more parts are not multiplied or divided.
const MANY: usize = 256;

/// More truths are not searched for factors that depend on several.
const SEARCHED: usize = 6;

/// Truths that may follow from each other: bounds of the same index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Block<'a> {
    Truth(TermId),
    Bounds(&'a [(Atom, i64)]),
}

/// A sum whose parts are written otherwise.
enum Regrouped {
    Product(TermId),
    Sum(Vec<(TermId, Number)>, f64),
}

/// What a term is in regard to truth values.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Truths {
    /// It is 0 or 1.
    pub(crate) is_truth: bool,
    /// It is a polynomial of truths that is no product.
    pub(crate) is_polynomial: bool,
    /// It is a product of truths that are no sums.
    is_monomial: bool,
    /// It has a factor that is a polynomial.
    pub(crate) has_polynomial: bool,
    /// It has one that is a sum.
    has_sum: bool,
}

impl Terms {
    /// What a new term is in regard to truth values.
    pub(crate) fn truths_in(&self, term: &Term) -> Truths {
        match term {
            Term::NotNegative(_) => Truths::of_atom(),
            Term::Apply(f, _) if crate::truth::is_truth_function(f.name) => Truths::of_atom(),
            Term::Number(x) => {
                Truths { is_truth: *x == Number::ONE || *x == Number::ZERO, ..Truths::default() }
            }
            Term::Product(factors) => {
                let of = |(t, e): &(TermId, Number)| (*self.truths_of(*t), *e == Number::ONE);
                let all = |is: &dyn Fn(Truths) -> bool| {
                    factors.iter().map(of).all(|(t, one)| one && is(t))
                };
                let any = |is: &dyn Fn(Truths) -> bool| {
                    factors.iter().map(of).any(|(t, one)| one && is(t))
                };
                Truths {
                    is_truth: all(&|t| t.is_truth),
                    is_polynomial: false,
                    is_monomial: all(&|t| t.is_monomial),
                    has_polynomial: any(&|t| t.is_polynomial),
                    has_sum: any(&|t| t.is_polynomial && !t.is_monomial),
                }
            }
            Term::Sum(parts, constant) => {
                let is_polynomial = parts.iter().all(|(t, _)| self.truths_of(*t).is_monomial)
                    && (parts.len() > 1 || *constant != Number::ZERO);
                let is_negation = *constant == Number::ONE
                    && matches!(&parts[..], [(t, f)] if f.value() == -1.0 && self.is_truth(*t));
                Truths {
                    is_truth: is_negation
                        || is_polynomial && self.is_truth_valued(parts, constant.value()),
                    is_polynomial,
                    is_monomial: false,
                    has_polynomial: is_polynomial,
                    has_sum: is_polynomial,
                }
            }
            _ => Truths::default(),
        }
    }

    /// Whether a polynomial is 0 or 1, whatever its truths are.
    fn is_truth_valued(&self, parts: &[(TermId, Number)], constant: f64) -> bool {
        if parts.len() > FEW || parts.iter().any(|(_, f)| f.value().fract() != 0.0) {
            return false;
        }
        let sum = parts.iter().map(|(t, f)| (self.monomial(*t), f.value()));
        let mut polynomial: Polynomial = sum.collect();
        polynomial.insert(vec![], constant);
        self.blocks(&polynomial).len() <= SEARCHED
            && self.values_in(&polynomial, &|x| x == 0.0 || x == 1.0)
    }

    /// Whether all values of a polynomial are such.
    fn values_in(&self, polynomial: &Polynomial, is: &dyn Fn(f64) -> bool) -> bool {
        let Some(block) = self.blocks(polynomial).into_iter().next() else {
            return is(polynomial.values().sum());
        };
        // Of truths in a block, ordered so that each follows from the one before, the first that holds.
        let mut truths: Vec<TermId> = polynomial
            .keys()
            .flatten()
            .copied()
            .filter(|t| self.block(*t) == block)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        truths.sort_by_key(|t| self.bound(*t));
        (0..=truths.len()).all(|first| {
            let mut rest = Polynomial::new();
            for (monomial, factor) in polynomial {
                let own = |t: &&TermId| truths.contains(t);
                let holds = monomial.iter().filter(own).all(|t| truths[first..].contains(t));
                if holds {
                    let others = monomial.iter().filter(|t| !own(t)).copied().collect();
                    *rest.entry(others).or_insert(0.0) += factor;
                }
            }
            self.values_in(&rest, is)
        })
    }

    fn block(&self, truth: TermId) -> Block<'_> {
        match self.get(truth) {
            Term::NotNegative(ix) => Block::Bounds(&self.affine(*ix).atoms),
            _ => Block::Truth(truth),
        }
    }

    /// The constant of a bound: those of the same block that have a smaller one imply it.
    fn bound(&self, truth: TermId) -> i64 {
        match self.get(truth) {
            Term::NotNegative(ix) => self.affine(*ix).constant,
            _ => 0,
        }
    }

    fn blocks(&self, polynomial: &Polynomial) -> BTreeSet<Block<'_>> {
        polynomial.keys().flatten().map(|t| self.block(*t)).collect()
    }

    /// Whether a polynomial is one of bounds alone.
    pub(crate) fn is_of_bounds(&self, id: TermId) -> bool {
        let is_bound = |t: &TermId| matches!(self.get(*t), Term::NotNegative(_));
        self.truths_of(id).is_polynomial && self.polynomial_of(id).keys().flatten().all(is_bound)
    }

    /// The truths whose product a term is.
    fn monomial(&self, id: TermId) -> Vec<TermId> {
        match self.get(id) {
            Term::Product(factors) => factors.iter().map(|(t, _)| *t).collect(),
            _ => vec![id],
        }
    }

    /// What a factor is as a polynomial.
    fn polynomial_of(&self, id: TermId) -> Polynomial {
        match self.get(id) {
            Term::Sum(parts, constant) => {
                let parts = parts.iter().map(|(t, f)| (self.monomial(*t), f.value()));
                let mut polynomial: Polynomial = parts.collect();
                if *constant != Number::ZERO {
                    polynomial.insert(vec![], constant.value());
                }
                polynomial
            }
            _ => Polynomial::from([(self.monomial(id), 1.0)]),
        }
    }

    /// The product of truths: each once, and not those that follow from another.
    fn both(&self, a: &[TermId], b: &[TermId]) -> Vec<TermId> {
        let mut all = [a, b].concat();
        all.sort_unstable();
        all.dedup();
        let implied = |t: &TermId| {
            matches!(self.get(*t), Term::NotNegative(_))
                && all
                    .iter()
                    .any(|o| self.bound(*o) < self.bound(*t) && self.block(*o) == self.block(*t))
        };
        all.iter().copied().filter(|t| !implied(t)).collect()
    }

    fn multiplied(&self, a: &Polynomial, b: &Polynomial) -> Polynomial {
        let mut product: BTreeMap<Vec<TermId>, Total> = BTreeMap::new();
        for (x, f) in a {
            for (y, g) in b {
                product.entry(self.both(x, y)).or_default().add(f * g);
            }
        }
        left(product)
    }

    /// Multiplies the polynomials among factors that have truths in common, and returns a number that is a factor besides.
    pub(crate) fn multiply_polynomials(&mut self, factors: &mut BTreeMap<TermId, f64>) -> f64 {
        let (mut polynomials, mut powers) = (vec![], vec![]);
        for (&term, exponent) in factors.iter_mut() {
            let truths = self.truths_of(term);
            if truths.is_truth && *exponent > 0.0 {
                *exponent = 1.0;
            }
            if truths.is_polynomial && *exponent == 1.0 {
                polynomials.push((term, self.polynomial_of(term)));
            } else if truths.is_polynomial
                && let Some(power) = self.power_of(self.polynomial_of(term), *exponent)
            {
                powers.push((term, power));
            }
        }
        if polynomials.len() + powers.len() < 2 && powers.is_empty() {
            return 1.0;
        }
        let powers_at = polynomials.len();
        polynomials.extend(powers);
        // Those that have truths in common, directly or by others.
        let mut groups: Vec<(BTreeSet<Block>, Vec<usize>)> = vec![];
        let mut group_of: BTreeMap<Block, usize> = BTreeMap::new();
        for (n, (_, polynomial)) in polynomials.iter().enumerate() {
            let blocks = self.blocks(polynomial);
            let met: BTreeSet<usize> =
                blocks.iter().filter_map(|b| group_of.get(b).copied()).collect();
            let mut joined = (blocks, vec![n]);
            for old in met {
                let (blocks, members) = std::mem::take(&mut groups[old]);
                joined.0.extend(blocks);
                joined.1.extend(members);
            }
            group_of.extend(joined.0.iter().map(|b| (*b, groups.len())));
            groups.push(joined);
        }
        let mut changed: Vec<(Vec<TermId>, Polynomial)> = vec![];
        for (_, members) in groups {
            if members.is_empty() || members.len() == 1 && members[0] < powers_at {
                continue;
            }
            let mut product = Polynomial::from([(vec![], 1.0)]);
            for n in &members {
                product = self.multiplied(&product, &polynomials[*n].1);
                if product.len() > MANY {
                    break;
                }
            }
            if product.len() <= MANY {
                changed.push((members.iter().map(|n| polynomials[*n].0).collect(), product));
            }
        }
        let mut number = 1.0;
        for (members, product) in changed {
            for term in members {
                factors.remove(&term);
            }
            if product.is_empty() {
                return 0.0;
            }
            let (factor, found) = self.factored(product);
            number *= factor;
            for term in found {
                let exponent = factors.entry(term).or_insert(0.0);
                *exponent += 1.0;
                if *exponent == 0.0 {
                    factors.remove(&term);
                }
            }
        }
        number
    }

    /// A power of a polynomial of one truth, or of bounds of one index: that of each of its values.
    fn power_of(&self, polynomial: Polynomial, exponent: f64) -> Option<Polynomial> {
        if self.blocks(&polynomial).len() != 1 {
            return None;
        }
        let mut steps: Vec<(Vec<TermId>, f64)> = polynomial.into_iter().collect();
        steps.sort_by_key(|(t, _)| t.first().map(|t| -self.bound(*t)));
        if steps.first().is_some_and(|(t, _)| !t.is_empty()) {
            steps.insert(0, (vec![], 0.0));
        }
        let (mut value, mut before) = (0.0, 0.0);
        for (_, step) in &mut steps {
            value += *step;
            let is_defined = if exponent > 0.0 { value >= 0.0 } else { value > 0.0 };
            if !is_defined && (exponent.fract() != 0.0 || value == 0.0) {
                return None;
            }
            let power = value.powf(exponent);
            *step = power - before;
            before = power;
        }
        Some(steps.into_iter().filter(|(_, step)| *step != 0.0).collect())
    }

    /// A number, and polynomials without common truths that are no products, whose product a polynomial is.
    fn factored(&mut self, mut polynomial: Polynomial) -> (f64, Vec<TermId>) {
        let (mut number, mut factors) = (1.0, vec![]);
        loop {
            let divided = self.divided(&polynomial);
            let (factor, rest) = divided.map_or((polynomial, None), |(f, rest)| (f, Some(rest)));
            let (size, term) = self.of_polynomial(&factor);
            number *= size;
            if self.as_number(term).is_none() {
                factors.push(term);
            }
            let Some(rest) = rest else { return (number, factors) };
            polynomial = rest;
        }
    }

    /// A factor of a polynomial that is none itself, and the rest.
    fn divided(&self, polynomial: &Polynomial) -> Option<(Polynomial, Polynomial)> {
        let blocks: Vec<Block> = self.blocks(polynomial).into_iter().collect();
        if blocks.len() < 2 || polynomial.len() > MANY {
            return None;
        }
        if let Some(found) =
            blocks.iter().find_map(|block| self.divided_by(polynomial, std::slice::from_ref(block)))
        {
            return Some(found);
        }
        if blocks.len() > SEARCHED {
            return None;
        }
        // Sets of blocks with the first, up to half of all or all but few.
        let mut sets: Vec<u32> = (1..1 << (blocks.len() - 1)).collect();
        sets.sort_by_key(|set| set.count_ones());
        sets.into_iter().filter(|set| (set.count_ones() as usize) < blocks.len() - 1).find_map(
            |set| {
                let others = (1..blocks.len()).filter(|k| set >> (k - 1) & 1 == 1);
                let chosen: Vec<Block> =
                    std::iter::once(0).chain(others).map(|k| blocks[k]).collect();
                self.divided_by(polynomial, &chosen)
            },
        )
    }

    /// The polynomial of these blocks and that of the others whose product a polynomial is.
    fn divided_by(
        &self,
        polynomial: &Polynomial,
        blocks: &[Block],
    ) -> Option<(Polynomial, Polynomial)> {
        let split = |monomial: &[TermId]| -> (Vec<TermId>, Vec<TermId>) {
            monomial.iter().partition(|t| blocks.contains(&self.block(**t)))
        };
        let parts: BTreeMap<(Vec<TermId>, Vec<TermId>), f64> =
            polynomial.iter().map(|(monomial, f)| (split(monomial), *f)).collect();
        let ((own, other), pivot) = parts.first_key_value()?;
        let first: Polynomial = (parts.iter().filter(|((_, r), _)| r == other))
            .map(|((s, _), f)| (s.clone(), *f))
            .collect();
        let second: Polynomial = (parts.iter().filter(|((s, _), _)| s == own))
            .map(|((_, r), f)| (r.clone(), f / pivot))
            .collect();
        let is_product = |((s, r), f): (&(Vec<TermId>, Vec<TermId>), &f64)| {
            let Some((a, b)) = first.get(s).zip(second.get(r)) else { return false };
            let exact = (*f == a * b) || (f.fract() != 0.0 || a.fract() != 0.0 || b.fract() != 0.0);
            exact && (f - a * b).abs() <= SAME_NUMBER * f.abs()
        };
        let counts = parts.len() == first.len() * second.len();
        (counts && parts.iter().all(is_product)).then_some((first, second))
    }

    /// A polynomial as a number and a term.
    fn of_polynomial(&mut self, polynomial: &Polynomial) -> (f64, TermId) {
        let (mut parts, mut constant) = (vec![], 0.0);
        for (monomial, factor) in polynomial {
            match &monomial[..] {
                [] => constant = *factor,
                _ => {
                    let factor = self.number(*factor);
                    parts.push((self.of_monomial(monomial), factor));
                }
            }
        }
        parts.sort_unstable_by_key(|(t, _)| *t);
        let term = self.sum_of_parts(parts, constant);
        self.content(term)
    }

    fn of_monomial(&mut self, monomial: &[TermId]) -> TermId {
        match monomial {
            [] => self.constant(1.0),
            &[truth] => truth,
            _ => self.term(Term::Product(monomial.iter().map(|t| (*t, Number::ONE)).collect())),
        }
    }

    /// The polynomials among the factors of a term, and the product of the others.
    pub(crate) fn without_polynomials(&mut self, id: TermId) -> (Vec<TermId>, TermId) {
        let truths = *self.truths_of(id);
        if truths.is_polynomial {
            return (vec![id], self.constant(1.0));
        }
        if !truths.has_polynomial {
            return (vec![], id);
        }
        let Term::Product(factors) = self.get(id).clone() else { return (vec![], id) };
        let (polynomials, others): (Vec<_>, Vec<_>) = (factors.iter().copied())
            .partition(|(t, e)| *e == Number::ONE && self.truths_of(*t).is_polynomial);
        let others = match &others[..] {
            [] => self.constant(1.0),
            others => self.some_of(others),
        };
        (polynomials.into_iter().map(|(t, _)| t).collect(), others)
    }

    /// The product of polynomials without common truths, if it has few parts or is one of them.
    fn written(&self, polynomials: &[TermId]) -> Option<Polynomial> {
        let sizes = polynomials.iter().map(|p| match self.get(*p) {
            Term::Sum(parts, constant) => parts.len() + usize::from(*constant != Number::ZERO),
            _ => 1,
        });
        let sizes: Vec<usize> = sizes.filter(|n| *n > 1).collect();
        let size = sizes.iter().fold(1_usize, |all, n| all.saturating_mul(*n));
        if sizes.len() > 1 && size > FEW {
            return None;
        }
        let one = Polynomial::from([(vec![], 1.0)]);
        Some(
            polynomials
                .iter()
                .fold(one, |product, p| self.multiplied(&product, &self.polynomial_of(*p))),
        )
    }

    /// A term as a sum of products of truths with another term: of those polynomials that are asked for, if that has few parts.
    pub(crate) fn written_as_sum(
        &mut self,
        id: TermId,
        is_one: impl Fn(&Terms, TermId) -> bool,
    ) -> Option<Vec<(TermId, f64)>> {
        if !self.truths_of(id).has_sum {
            return None;
        }
        let (polynomials, of) = self.without_polynomials(id);
        let (own, others): (Vec<_>, Vec<_>) =
            polynomials.into_iter().partition(|p| is_one(self, *p));
        let polynomial = self.written(&own)?;
        if polynomial.len() < 2 {
            return None;
        }
        let mut rest: Vec<(TermId, f64)> = others.into_iter().map(|p| (p, 1.0)).collect();
        rest.push((of, 1.0));
        Some(self.times_each(&polynomial, &rest))
    }

    /// The products of a polynomial's truths with these factors.
    fn times_each(
        &mut self,
        polynomial: &Polynomial,
        rest: &[(TermId, f64)],
    ) -> Vec<(TermId, f64)> {
        let mut parts = vec![];
        for (monomial, factor) in polynomial {
            let truths = monomial.iter().map(|t| (*t, 1.0));
            let factors: Vec<(TermId, f64)> = truths.chain(rest.iter().copied()).collect();
            parts.push((self.product(&factors), *factor));
        }
        parts
    }

    /// A sum of parts of which some have polynomials as factors.
    pub(crate) fn sum_of_choices(
        &mut self,
        mut parts: Vec<(TermId, Number)>,
        mut constant: f64,
    ) -> TermId {
        // What is written out may meet more of the same.
        for _ in 0..4 {
            if !parts.iter().any(|(t, _)| self.truths_of(*t).has_sum) {
                break;
            }
            let Some(next) = self.regrouped(&parts, constant) else { break };
            match next {
                Regrouped::Product(term) => return term,
                Regrouped::Sum(sum, rest) => (parts, constant) = (sum, rest),
            }
            if parts.is_empty() || parts.len() == 1 && constant == 0.0 {
                break;
            }
        }
        match self.as_product(&parts, constant) {
            Some(product) => product,
            None => self.sum_of_parts(parts, constant),
        }
    }

    /// The parts of a sum, of which those that differ in polynomials alone are added and written out, if that has few parts; or what
    /// the sum is, if all of it is one product. None if all stay.
    fn regrouped(&mut self, parts: &[(TermId, Number)], constant: f64) -> Option<Regrouped> {
        let one = self.constant(1.0);
        let mut groups: BTreeMap<TermId, Vec<(TermId, Vec<TermId>, f64)>> = BTreeMap::new();
        if constant != 0.0 {
            groups.insert(one, vec![(one, vec![], constant)]);
        }
        for &(part, factor) in parts {
            let (polynomials, of) = self.without_polynomials(part);
            groups.entry(of).or_default().push((part, polynomials, factor.value()));
        }
        let is_all = groups.len() == 1;
        let (mut sum, mut changed) = (vec![], false);
        for (of, members) in groups {
            match self.added(of, &members, is_all) {
                Some(found) if is_all => return Some(Regrouped::Product(self.sum(&found, 0.0))),
                Some(found) => {
                    changed = true;
                    sum.extend(found);
                }
                None => sum.extend(members.into_iter().map(|(part, _, f)| (part, f))),
            }
        }
        if !changed {
            return None;
        }
        let (parts, constant, largest) = self.collected(&sum, 0.0);
        // Integers stay exact.
        if largest >= WHOLE && self.kinds(sum.iter().map(|p| p.0)) == Kind::Integer {
            return None;
        }
        Some(Regrouped::Sum(parts, if constant.cancels() { 0.0 } else { constant.sum }))
    }

    /// Parts of a sum that are polynomials times the same term: written out, or as one product; none if they stay as they are.
    fn added(
        &mut self,
        of: TermId,
        members: &[(TermId, Vec<TermId>, f64)],
        as_product: bool,
    ) -> Option<Vec<(TermId, f64)>> {
        if !members.iter().any(|(_, p, _)| p.iter().any(|p| !self.truths_of(*p).is_monomial)) {
            return None;
        }
        let mut common = members[0].1.clone();
        for (_, polynomials, _) in &members[1..] {
            common.retain(|p| polynomials.contains(p));
        }
        let mut rest: BTreeMap<Vec<TermId>, Total> = BTreeMap::new();
        for (_, polynomials, factor) in members {
            let own: Vec<TermId> =
                polynomials.iter().copied().filter(|p| !common.contains(p)).collect();
            for (monomial, f) in self.written(&own)? {
                rest.entry(monomial).or_default().add(f * factor);
            }
        }
        let rest = left(rest);
        if rest.is_empty() {
            return Some(vec![]);
        }
        let (number, mut factors) = self.factored(rest);
        factors.extend(common);
        if !as_product && let Some(polynomial) = self.written(&factors) {
            let parts = self.times_each(&polynomial, &[(of, 1.0)]);
            return Some(parts.into_iter().map(|(t, f)| (t, f * number)).collect());
        }
        if members.len() == 1 {
            return None;
        }
        factors.push(of);
        let factors: Vec<(TermId, f64)> = factors.into_iter().map(|t| (t, 1.0)).collect();
        Some(vec![(self.product(&factors), number)])
    }

    /// The product that a sum is, if its parts are truths times the same term.
    fn as_product(&mut self, parts: &[(TermId, Number)], constant: f64) -> Option<TermId> {
        if parts.is_empty() || parts.len() == 1 && constant == 0.0 {
            return None;
        }
        let (mut polynomial, mut rest, mut of) = (Polynomial::new(), vec![], None);
        for &(part, factor) in parts {
            let (truths, other) = self.without_polynomials(part);
            if truths.is_empty() {
                rest.push((part, factor));
                continue;
            }
            let is_written = truths.iter().all(|t| self.truths_of(*t).is_monomial);
            if !is_written || *of.get_or_insert(other) != other {
                return None;
            }
            polynomial.insert(truths, factor.value());
        }
        let (size, of) = self.content(of?);
        polynomial.values_mut().for_each(|factor| *factor *= size);
        let rest = self.sum_of_parts(rest, constant);
        let (factor, rest) = self.content(rest);
        if factor != 0.0 {
            if rest != of {
                return None;
            }
            polynomial.insert(vec![], factor);
        }
        let (number, mut factors) = self.factored(polynomial);
        if self.as_number(of).is_some() && factors.len() == 1 {
            return None;
        }
        factors.push(of);
        let factors: Vec<(TermId, f64)> = factors.into_iter().map(|t| (t, 1.0)).collect();
        let product = self.product(&factors);
        Some(self.scale(product, number))
    }
}

impl Truths {
    fn of_atom() -> Truths {
        Truths {
            is_truth: true,
            is_polynomial: true,
            is_monomial: true,
            has_polynomial: true,
            has_sum: false,
        }
    }
}

/// What does not cancel.
fn left(sum: BTreeMap<Vec<TermId>, Total>) -> Polynomial {
    let kept = sum.into_iter().filter(|(_, total)| !total.cancels());
    kept.map(|(monomial, total)| (monomial, total.sum)).collect()
}

#[cfg(test)]
mod tests;
