//! What is known of the weights of a softmax: tables of truth values, bounds of indices and powers of e of constants, as one table.
//!
//! Whether a graph excludes scores by two constant masks or by their conjunction, or adds two constants to them or their sum, what is
//! left of them is the same.

use crate::algebra::EXCLUDED;
use crate::index::{Affine, Atom, Ix, Var};
use crate::lemmas::{scores_of_values, truths_of_values};
use crate::term::{Number, Term, TermId, Terms};
use std::collections::BTreeSet;
use std::rc::Rc;

/// Larger tables are not made.
const MOST: usize = 1 << 22;

/// A constant, and the indices at which it is read.
struct Table {
    sizes: Vec<usize>,
    values: Rc<[f64]>,
    at: Rc<[Ix]>,
}

impl Table {
    /// Its element; none outside.
    fn element(&self, at: impl Iterator<Item = i64>) -> Option<f64> {
        let place = at.zip(&self.sizes).try_fold(0, |all, (ix, n)| {
            let i = usize::try_from(ix).ok().filter(|i| i < n)?;
            Some(all * n + i)
        });
        Some(self.values[place?])
    }
}

/// A factor of known values.
enum Known {
    /// Of truths c; or of their negation, which is 1 times 1 − c, or −1 times c − 1.
    Truths(Table, Option<i8>),
    /// Of an index that is not negative.
    Bound(Ix),
    /// Of e to the power of a multiple of a constant.
    Power(Table, f64),
}

impl Known {
    fn indices(&self) -> &[Ix] {
        match self {
            Known::Truths(table, _) | Known::Power(table, _) => &table.at,
            Known::Bound(ix) => std::slice::from_ref(ix),
        }
    }

    /// Whether it is a table that excludes elements.
    fn excludes(&self) -> bool {
        let excludes =
            |(table, factor): (&Table, &f64)| table.values.iter().any(|x| factor * x <= EXCLUDED);
        matches!(self, Known::Power(table, factor) if excludes((table, factor)))
    }

    /// Its logarithm at these indices, −∞ where a truth does not hold; none outside of the table.
    fn logarithm(&self, mut at: impl Iterator<Item = i64>) -> Option<f64> {
        let truth = |holds: bool| if holds { 0.0 } else { f64::NEG_INFINITY };
        match self {
            Known::Bound(_) => at.next().map(|ix| truth(ix >= 0)),
            Known::Truths(table, negation) => {
                Some(truth((table.element(at)? != 0.0) != negation.is_some()))
            }
            Known::Power(table, factor) => {
                let power = factor * table.element(at)?;
                Some(if power <= EXCLUDED { f64::NEG_INFINITY } else { power })
            }
        }
    }
}

/// A sum of multiples of variables, in their order, and a constant.
struct Linear {
    factors: Vec<i64>,
    constant: i64,
}

impl Linear {
    fn at(&self, place: &[i64]) -> i64 {
        self.constant + self.factors.iter().zip(place).map(|(f, i)| f * i).sum::<i64>()
    }
}

impl Terms {
    /// The product, of whose known factors, if one is of a table, all are one.
    pub(crate) fn with_one_mask(&mut self, product: TermId) -> TermId {
        if let Some(found) = self.masked.get(&product) {
            return *found;
        }
        // The table itself may be such a product.
        self.masked.insert(product, product);
        let joined = self.masked_by_one(product);
        self.masked.insert(product, joined);
        joined
    }

    fn masked_by_one(&mut self, product: TermId) -> TermId {
        let (number, scaled) = self.content(product);
        let Term::Product(factors) = self.get(scaled).clone() else { return product };
        let known: Vec<Option<Known>> = factors.iter().map(|f| self.known(*f)).collect();
        let is_table = |known: &Option<Known>| !matches!(known, None | Some(Known::Bound(_)));
        let is_alone = known.iter().flatten().count() < 2;
        if is_alone && !known.iter().flatten().any(Known::excludes) || !known.iter().any(is_table) {
            return product;
        }
        let of_known = factors.iter().zip(&known).filter(|(_, known)| known.is_some());
        let vars: BTreeSet<Var> =
            of_known.flat_map(|((t, _), _)| self.vars_of(*t).to_vec()).collect();
        let vars: Vec<Var> = vars.into_iter().collect();
        let sizes: Vec<usize> = vars.iter().map(|var| var.extent as usize).collect();
        let volume = sizes.iter().try_fold(1_usize, |all, n| all.checked_mul(*n));
        let Some(volume) = volume.filter(|volume| *volume <= MOST) else { return product };
        let indices: Vec<(&Known, Vec<Linear>)> = (known.iter().flatten())
            .map(|known| {
                (known, known.indices().iter().map(|ix| self.linear(*ix, &vars)).collect())
            })
            .collect();
        let mut place = vec![0_i64; vars.len()];
        let mut values = Vec::with_capacity(volume);
        for _ in 0..volume {
            let mut sum = 0.0;
            for (known, indices) in &indices {
                match known.logarithm(indices.iter().map(|index| index.at(&place))) {
                    Some(f64::NEG_INFINITY) => {
                        sum = f64::NEG_INFINITY;
                        break;
                    }
                    Some(logarithm) => sum += logarithm,
                    None => return product,
                }
            }
            values.push(sum);
            for (at, n) in place.iter_mut().zip(&sizes).rev() {
                *at += 1;
                if *at < *n as i64 {
                    break;
                }
                *at = 0;
            }
        }
        let at: Vec<Ix> = vars.iter().map(|var| self.atom(Atom::Var(*var))).collect();
        let is_kept = |x: &f64| *x != f64::NEG_INFINITY;
        let table = if known.iter().flatten().any(|k| matches!(k, Known::Power(..))) {
            if !values.iter().any(is_kept) {
                return product;
            }
            let scores = scores_of_values(self, &sizes, values);
            let scores = self.at(scores, &sizes, &at);
            self.exp(scores)
        } else {
            let truths = values.iter().map(|x| f64::from(is_kept(x))).collect();
            let truths = truths_of_values(self, &sizes, truths);
            self.at(truths, &sizes, &at)
        };
        let others = factors.iter().zip(&known).filter(|(_, known)| known.is_none());
        let mut all: Vec<(TermId, f64)> = others.map(|((t, e), _)| (*t, e.value())).collect();
        all.push((table, 1.0));
        let all = self.product(&all);
        let is_minus = |known: &&Known| matches!(known, Known::Truths(_, Some(-1)));
        let minus = known.iter().flatten().filter(is_minus).count() % 2 == 1;
        self.scale(all, if minus { -number } else { number })
    }

    /// What is known of a factor, if all of its variables are bounded.
    fn known(&self, (factor, exponent): (TermId, Number)) -> Option<Known> {
        if let Term::Apply(f, operands) = self.get(factor) {
            let table = if f.name == "exp" { self.table(operands[0])? } else { return None };
            return Some(Known::Power(table, exponent.value()));
        }
        if exponent != Number::ONE {
            return None;
        }
        let (term, negation) = match self.get(factor) {
            Term::Sum(parts, constant) => match (&parts[..], constant.value()) {
                (&[(part, minus)], 1.0) if minus.value() == -1.0 => (part, Some(1)),
                (&[(part, Number::ONE)], -1.0) => (part, Some(-1)),
                _ => return None,
            },
            _ => (factor, None),
        };
        if let Term::NotNegative(ix) = self.get(term) {
            return (negation.is_none() && self.is_of_axes(*ix)).then_some(Known::Bound(*ix));
        }
        let table = self.table(term)?;
        let are_truths = table.values.iter().all(|x| *x == 0.0 || *x == 1.0);
        are_truths.then_some(Known::Truths(table, negation))
    }

    /// The constant that a term reads.
    fn table(&self, term: TermId) -> Option<Table> {
        let Term::Leaf(leaf, at) = self.get(term) else { return None };
        if !at.iter().all(|ix| self.is_of_axes(*ix)) {
            return None;
        }
        let mut tables = self.constants.iter().flat_map(|(sizes, of_sizes)| {
            of_sizes.iter().map(move |(tensor, leaf)| (sizes, tensor, leaf))
        });
        let (sizes, tensor, _) = tables.find(|(_, _, of)| *of == leaf)?;
        Some(Table { sizes: sizes.clone(), values: tensor.to_f64s().into(), at: at.clone() })
    }

    /// Whether an index is a sum of multiples of variables whose extents are known.
    fn is_of_axes(&self, ix: Ix) -> bool {
        let is_axis =
            |(atom, _): &(Atom, i64)| matches!(atom, Atom::Var(var) if var.extent <= MOST as u64);
        self.affine(ix).atoms.iter().all(is_axis)
    }

    fn linear(&self, ix: Ix, vars: &[Var]) -> Linear {
        let Affine { atoms, constant } = self.affine(ix);
        let mut factors = vec![0; vars.len()];
        for (atom, factor) in atoms {
            let place = match atom {
                Atom::Var(var) => vars.binary_search(var).ok(),
                _ => None,
            };
            factors[place.expect("invariant: one of the variables of a factor")] += factor;
        }
        Linear { factors, constant: *constant }
    }
}
