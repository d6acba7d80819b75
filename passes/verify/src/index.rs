//! Indices of elements: sums of variables with integer factors, quotients and remainders, in a normal form.
//!
//! Reshapes are index arithmetic: the place of an element is divided by the strides of the other shape. What is known of the
//! range of every variable makes most quotients and remainders disappear, and `n·(i div n) + i mod n` is `i` again.

use crate::term::{TermId, Terms};

/// A variable that stands for an index along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Var {
    pub(crate) kind: Kind,
    pub(crate) number: u32,
    /// The variable is below this, and not negative unless this is [`SIGNED`].
    pub(crate) extent: u64,
}

/// The extent of what stands for an index that is not negative, and of which nothing else is known.
pub(crate) const ANY: u64 = 1 << 40;

/// The extent of what stands for an index that may be negative.
pub(crate) const SIGNED: u64 = 1 << 41;

/// What a variable belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The axis of this number of the value that a term is of.
    Axis,
    /// An argument of a definition.
    Argument,
    /// Bound by a reduction.
    Bound,
    /// For the moment, while a definition is opened.
    Fresh,
    /// The rank that executes.
    Rank,
}

/// Names an index of [`Terms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Ix(pub(crate) u32);

/// Part of an index that is no sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Atom {
    Var(Var),
    /// Quotient, rounded down.
    Div(Ix, i64),
    /// Remainder.
    Mod(Ix, i64),
    /// An element of data.
    Data(TermId),
}

/// Σ factor·atom + constant; atoms in order, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Affine {
    pub(crate) atoms: Vec<(Atom, i64)>,
    pub(crate) constant: i64,
}

/// Beyond every size of a tensor.
const UNKNOWN: i64 = 1 << 53;

impl Terms {
    pub(crate) fn constant_index(&mut self, constant: i64) -> Ix {
        self.index(Affine { atoms: vec![], constant })
    }

    /// The variable as an index; 0 if it has no other value.
    pub(crate) fn var(&mut self, kind: Kind, number: usize, extent: u64) -> Ix {
        match extent {
            1 => self.constant_index(0),
            _ => {
                let var = Var { kind, number: number as u32, extent };
                self.atom(Atom::Var(var))
            }
        }
    }

    pub(crate) fn atom(&mut self, atom: Atom) -> Ix {
        self.index(Affine { atoms: vec![(atom, 1)], constant: 0 })
    }

    /// Indices along the axes of a value of these sizes.
    pub(crate) fn axes(&mut self, sizes: &[usize]) -> Vec<Ix> {
        (0..sizes.len()).map(|k| self.var(Kind::Axis, k, sizes[k] as u64)).collect()
    }

    /// Least and largest value.
    pub(crate) fn range(&self, ix: Ix) -> (i64, i64) {
        let affine = self.affine(ix);
        let mut range = (affine.constant, affine.constant);
        for &(atom, factor) in &affine.atoms {
            let (low, high) = self.atom_range(atom);
            let (a, b) = (low.saturating_mul(factor), high.saturating_mul(factor));
            range.0 = range.0.saturating_add(a.min(b));
            range.1 = range.1.saturating_add(a.max(b));
        }
        range
    }

    fn atom_range(&self, atom: Atom) -> (i64, i64) {
        match atom {
            Atom::Var(var) if var.extent == SIGNED => (-UNKNOWN, UNKNOWN),
            Atom::Var(var) => (0, var.extent as i64 - 1),
            Atom::Div(of, n) => {
                let (low, high) = self.range(of);
                (low.div_euclid(n), high.div_euclid(n))
            }
            Atom::Mod(_, n) => (0, n - 1),
            Atom::Data(_) => (-UNKNOWN, UNKNOWN),
        }
    }

    pub(crate) fn plus(&mut self, a: Ix, b: Ix) -> Ix {
        let (mut sum, b) = (self.affine(a).clone(), self.affine(b).clone());
        sum.constant += b.constant;
        sum.atoms.extend(b.atoms);
        self.affine_sum(sum)
    }

    pub(crate) fn times(&mut self, a: Ix, factor: i64) -> Ix {
        let mut product = self.affine(a).clone();
        product.constant *= factor;
        product.atoms.iter_mut().for_each(|(_, f)| *f *= factor);
        self.affine_sum(product)
    }

    pub(crate) fn offset(&mut self, a: Ix, by: i64) -> Ix {
        let by = self.constant_index(by);
        self.plus(a, by)
    }

    /// Collects equal atoms, and joins quotients with their remainders.
    pub(crate) fn affine_sum(&mut self, mut sum: Affine) -> Ix {
        loop {
            sum.atoms.sort_unstable();
            let mut atoms: Vec<(Atom, i64)> = Vec::with_capacity(sum.atoms.len());
            for (atom, factor) in sum.atoms.drain(..) {
                match atoms.last_mut() {
                    Some((last, f)) if *last == atom => *f += factor,
                    _ => atoms.push((atom, factor)),
                }
            }
            atoms.retain(|(_, factor)| *factor != 0);
            sum.atoms = atoms;
            let Some((remainder, quotient, whole, factor)) = self.division(&sum) else {
                return self.index(sum);
            };
            sum.atoms.retain(|(atom, _)| *atom != remainder && *atom != quotient);
            let whole = self.affine(whole).clone();
            sum.constant += whole.constant * factor;
            sum.atoms.extend(whole.atoms.into_iter().map(|(a, f)| (a, f * factor)));
        }
    }

    /// A remainder and the quotient of the same division, such that both together are a multiple of what is divided, or of its
    /// remainder by more: x mod n + n·((x div n) mod m) = x mod (n·m).
    fn division(&mut self, sum: &Affine) -> Option<(Atom, Atom, Ix, i64)> {
        for &(atom, factor) in &sum.atoms {
            let Atom::Mod(of, n) = atom else { continue };
            let quotient = self.div(of, n);
            if let Affine { atoms, constant: 0 } = self.affine(quotient)
                && let &[(quotient, 1)] = &atoms[..]
                && sum.atoms.contains(&(quotient, factor * n))
            {
                return Some((atom, quotient, of, factor));
            }
            for &(other, larger) in &sum.atoms {
                let Atom::Mod(quotient, m) = other else { continue };
                if larger != factor * n {
                    continue;
                }
                let (whole, rest) = (self.times(quotient, n), self.atom(atom));
                let whole = self.plus(whole, rest);
                if self.affine(whole).atoms.iter().all(|(part, _)| *part != atom) {
                    return Some((atom, other, self.modulo(whole, n * m), factor));
                }
            }
        }
        None
    }

    /// The quotient by `n`, rounded down.
    pub(crate) fn div(&mut self, a: Ix, n: i64) -> Ix {
        if n == 1 {
            return a;
        }
        let affine = self.affine(a).clone();
        let (mut whole, mut rest) = (Affine::default(), Affine::default());
        for (atom, factor) in affine.atoms {
            match factor % n {
                0 => whole.atoms.push((atom, factor / n)),
                _ => rest.atoms.push((atom, factor)),
            }
        }
        whole.constant = affine.constant.div_euclid(n);
        rest.constant = affine.constant.rem_euclid(n);
        let rest = self.affine_sum(rest);
        let (low, high) = self.range(rest);
        let whole = self.affine_sum(whole);
        if low >= 0 && high < n {
            return whole;
        }
        let quotient = self.quotient(rest, n);
        self.plus(whole, quotient)
    }

    fn quotient(&mut self, a: Ix, n: i64) -> Ix {
        let affine = self.affine(a).clone();
        if let &[(Atom::Div(of, m), 1)] = &affine.atoms[..]
            && affine.constant == 0
        {
            return self.div(of, m * n);
        }
        // (x mod (n·m)) div n = (x div n) mod m.
        if let &[(Atom::Mod(of, m), 1)] = &affine.atoms[..]
            && affine.constant == 0
            && m % n == 0
        {
            let of = self.div(of, n);
            return self.modulo(of, m / n);
        }
        // (g·x + r) div (g·m) = x div m, if 0 ≤ r < g.
        let common = affine.atoms.iter().fold(n, |g, (_, f)| gcd(g, *f));
        if common > 1 {
            let mut reduced = affine;
            reduced.constant = reduced.constant.div_euclid(common);
            reduced.atoms.iter_mut().for_each(|(_, f)| *f /= common);
            let reduced = self.affine_sum(reduced);
            return self.div(reduced, n / common);
        }
        // Small terms may never carry.
        if let Some(larger) = self.without_small_terms(&affine, n) {
            return self.div(larger, n);
        }
        match affine.atoms.is_empty() {
            true => self.constant_index(affine.constant.div_euclid(n)),
            false => self.atom(Atom::Div(a, n)),
        }
    }

    /// The terms that are multiples of some g > 1 which divides n, where the others together are from 0 to below g.
    fn without_small_terms(&mut self, affine: &Affine, n: i64) -> Option<Ix> {
        let mut sizes: Vec<i64> = affine.atoms.iter().map(|(_, f)| gcd(*f, n)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        for g in sizes.into_iter().filter(|g| *g > 1) {
            let (large, small): (Vec<_>, Vec<_>) =
                affine.atoms.iter().partition(|(_, f)| f % g == 0);
            let rest = affine.constant.rem_euclid(g);
            let small = self.affine_sum(Affine { atoms: small, constant: rest });
            let (low, high) = self.range(small);
            if low >= 0 && high < g {
                let constant = affine.constant - rest;
                return Some(self.affine_sum(Affine { atoms: large, constant }));
            }
        }
        None
    }

    /// The remainder by `n`.
    pub(crate) fn modulo(&mut self, a: Ix, n: i64) -> Ix {
        let affine = self.affine(a).clone();
        let atoms = affine.atoms.into_iter().filter(|(_, f)| f % n != 0).collect();
        let rest = self.affine_sum(Affine { atoms, constant: affine.constant.rem_euclid(n) });
        let (low, high) = self.range(rest);
        if low >= 0 && high < n {
            return rest;
        }
        let affine = self.affine(rest).clone();
        if let &[(Atom::Mod(of, m), 1)] = &affine.atoms[..]
            && affine.constant == 0
            && m % n == 0
        {
            return self.modulo(of, n);
        }
        let common = affine.atoms.iter().fold(n, |g, (_, f)| gcd(g, *f));
        if common > 1 {
            let remainder = affine.constant.rem_euclid(common);
            let mut reduced = affine;
            reduced.constant = reduced.constant.div_euclid(common);
            reduced.atoms.iter_mut().for_each(|(_, f)| *f /= common);
            let reduced = self.affine_sum(reduced);
            let reduced = self.modulo(reduced, n / common);
            let back = self.times(reduced, common);
            return self.offset(back, remainder);
        }
        if let Some(large) = self.without_small_terms(&affine, n) {
            let minus = self.times(large, -1);
            let small = self.plus(rest, minus);
            let large = self.modulo(large, n);
            return self.plus(large, small);
        }
        self.atom(Atom::Mod(rest, n))
    }

    /// Where the element at `at` of a tensor of these sizes stands when elements are counted.
    pub(crate) fn place(&mut self, sizes: &[usize], at: &[Ix]) -> Ix {
        let mut place = self.constant_index(0);
        for (&n, &ix) in sizes.iter().zip(at) {
            place = self.times(place, n as i64);
            place = self.plus(place, ix);
        }
        place
    }

    /// The element at a place of a tensor of these sizes; of a tensor without elements any.
    pub(crate) fn at_place(&mut self, sizes: &[usize], place: Ix) -> Vec<Ix> {
        let mut stride = 1;
        let mut at = Vec::with_capacity(sizes.len());
        for &n in sizes.iter().rev() {
            let n = n.max(1) as i64;
            let quotient = self.div(place, stride);
            at.push(self.modulo(quotient, n));
            stride *= n;
        }
        at.reverse();
        at
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a.abs() } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn var(t: &mut Terms, number: usize, extent: u64) -> Ix {
        t.var(Kind::Axis, number, extent)
    }

    #[test]
    fn a_reshape_and_back_is_the_identity() {
        let shapes: [&[usize]; 5] = [&[24, 35], &[4, 6, 35], &[840], &[2, 2, 6, 5, 7], &[4, 210]];
        for a in shapes {
            for b in shapes {
                let mut t = Terms::default();
                let axes = t.axes(a);
                let place = t.place(a, &axes);
                let there = t.at_place(b, place);
                let place = t.place(b, &there);
                assert_eq!(t.at_place(a, place), axes, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn quotients_and_remainders_are_those_of_numbers() {
        let mut t = Terms::default();
        let (i, j) = (var(&mut t, 0, 12), var(&mut t, 1, 5));
        for (a, b, c, n) in
            [(1, 12, 0, 12), (5, 1, 0, 5), (4, 6, 3, 8), (3, 7, 2, 4), (10, 2, 1, 20)]
        {
            let (x, y) = (t.times(i, a), t.times(j, b));
            let sum = t.plus(x, y);
            let sum = t.offset(sum, c);
            let (div, modulo) = (t.div(sum, n), t.modulo(sum, n));
            for (vi, vj) in (0..12).flat_map(|vi| (0..5).map(move |vj| (vi, vj))) {
                let value = a * vi + b * vj + c;
                let values = |v: Var| if v.number == 0 { vi } else { vj };
                assert_eq!(number(&t, div, &values), value.div_euclid(n));
                assert_eq!(number(&t, modulo, &values), value.rem_euclid(n));
            }
        }
    }

    #[test]
    fn remainders_of_a_quotient_and_of_the_same_number_are_one() {
        for (n, m, by) in [(4, 3, 0), (4, 3, 7), (2, 5, 1), (8, 2, 3), (3, 9, -4)] {
            let mut t = Terms::default();
            let i = var(&mut t, 0, 120);
            let x = t.offset(i, by);
            let (rest, quotient) = (t.modulo(x, n), t.div(x, n));
            let quotient = t.modulo(quotient, m);
            let whole = t.modulo(x, n * m);
            assert_eq!(t.div(whole, n), quotient);
            let mut sum = |factor| {
                let part = t.times(quotient, factor);
                t.plus(part, rest)
            };
            let (joined, others) = (sum(n), [n - 1, n + 1, -n].map(sum));
            assert_eq!(joined, whole);
            for (factor, ix) in
                [(n, joined), (n - 1, others[0]), (n + 1, others[1]), (-n, others[2])]
            {
                assert_eq!(ix == whole, factor == n);
                for value in 0..120 {
                    let x = value + by;
                    let expected = factor * x.div_euclid(n).rem_euclid(m) + x.rem_euclid(n);
                    assert_eq!(number(&t, ix, &|_| value), expected);
                }
            }
        }
    }

    fn number(t: &Terms, ix: Ix, values: &dyn Fn(Var) -> i64) -> i64 {
        let affine = t.affine(ix);
        let atoms = affine.atoms.iter().map(|&(atom, factor)| {
            factor
                * match atom {
                    Atom::Var(v) => values(v),
                    Atom::Div(of, n) => number(t, of, values).div_euclid(n),
                    Atom::Mod(of, n) => number(t, of, values).rem_euclid(n),
                    Atom::Data(_) => unreachable!("there are no data"),
                }
        });
        affine.constant + atoms.sum::<i64>()
    }
}
