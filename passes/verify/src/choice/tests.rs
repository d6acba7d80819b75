//! Laws of polynomials of truth values, at random against numbers; and that chains of choices stay small.

use super::*;
use crate::index::{Ix, Kind};
use crate::term::Function;
use std::collections::HashMap;

const ROWS: i64 = 8;
const COLUMNS: i64 = 4;

/// Elements of leaves by number, and values of the two indices.
struct Point {
    leaves: Vec<f64>,
    at: [i64; 2],
}

/// Terms, and what each of them is at some points.
struct Terrain {
    t: Terms,
    points: Vec<Point>,
    leaves: Vec<TermId>,
    axes: [Ix; 2],
}

type Valued = (TermId, Vec<f64>);

impl Terrain {
    fn new(rng: &mut fastrand::Rng) -> Terrain {
        let mut t = Terms::default();
        let axes = [(0, ROWS), (1, COLUMNS)].map(|(k, n)| t.var(Kind::Axis, k, n as u64));
        let leaves = (0..6).map(|n| leaf(&mut t, &format!("x{n}"), &[])).collect();
        let mut points = vec![];
        for row in 0..ROWS {
            for column in 0..COLUMNS {
                let number = |_| (rng.u32(1..9) as f64 / 2.0) * if rng.bool() { 1.0 } else { -1.0 };
                points.push(Point { leaves: (0..6).map(number).collect(), at: [row, column] });
            }
        }
        Terrain { t, points, leaves, axes }
    }

    fn leaf(&self, n: usize) -> Valued {
        (self.leaves[n], self.points.iter().map(|p| p.leaves[n]).collect())
    }

    /// The truth of a leaf ≥ 0 or of a bound, or its negation.
    fn literal(&mut self, rng: &mut fastrand::Rng) -> Valued {
        let (truth, values): Valued = if rng.bool() {
            let (leaf, values) = self.leaf(rng.usize(..4));
            let is = |x: f64| f64::from(x >= 0.0);
            (self.t.not_negative(leaf), values.into_iter().map(is).collect())
        } else {
            let (k, sign, by) = (rng.usize(..2), if rng.bool() { 1 } else { -1 }, rng.i64(-5..6));
            let ix = self.t.times(self.axes[k], sign);
            let ix = self.t.offset(ix, by);
            let is = |p: &Point| f64::from(sign * p.at[k] + by >= 0);
            (self.t.index_not_negative(ix), self.points.iter().map(is).collect())
        };
        match rng.bool() {
            true => (truth, values),
            false => (self.t.not(truth), values.into_iter().map(|x| 1.0 - x).collect()),
        }
    }

    /// A term of this depth.
    fn any(&mut self, rng: &mut fastrand::Rng, depth: usize) -> Valued {
        if depth == 0 {
            return match rng.u32(..4) {
                0 => self.leaf(rng.usize(..6)),
                1 => (self.t.constant(2.0), vec![2.0; self.points.len()]),
                _ => self.literal(rng),
            };
        }
        let (a, x) = self.any(rng, depth - 1);
        let (b, y) = self.any(rng, depth - 1);
        let values =
            |f: &dyn Fn(f64, f64) -> f64| x.iter().zip(&y).map(|(x, y)| f(*x, *y)).collect();
        match rng.u32(..6) {
            0 => (self.t.add(a, b), values(&|x, y| x + y)),
            1 => (self.t.sub(a, b), values(&|x, y| x - y)),
            2 | 3 => (self.t.mul(a, b), values(&|x, y| x * y)),
            4 => (self.t.power(a, 2.0), values(&|x, _| x * x)),
            _ => {
                let (condition, holds) = self.literal(rng);
                let chosen = values(&|x, _| x);
                let values: Vec<f64> = chosen.iter().zip(&y).map(|(x, _)| *x).collect();
                let both = values.iter().zip(&y).zip(&holds);
                let chosen = both.map(|((x, y), c)| if *c == 1.0 { *x } else { *y }).collect();
                (self.t.select(condition, a, b), chosen)
            }
        }
    }

    fn value(&self, id: TermId, p: &Point) -> f64 {
        match self.t.get(id) {
            Term::Number(x) => x.value(),
            Term::Leaf(leaf, _) => p.leaves[*leaf as usize],
            Term::NotNegative(ix) => {
                let affine = self.t.affine(*ix);
                let atoms = affine.atoms.iter().map(|(atom, factor)| match atom {
                    Atom::Var(v) => p.at[v.number as usize] * factor,
                    _ => panic!("an index is a variable"),
                });
                f64::from(atoms.sum::<i64>() + affine.constant >= 0)
            }
            Term::Sum(parts, constant) => {
                let parts = parts.iter().map(|(t, f)| f.value() * self.value(*t, p));
                parts.sum::<f64>() + constant.value()
            }
            Term::Product(factors) => {
                factors.iter().map(|(t, e)| self.value(*t, p).powf(e.value())).product()
            }
            Term::Apply(Function { name: "not_negative", .. }, x) => {
                f64::from(self.value(x[0], p) >= 0.0)
            }
            other => panic!("{other:?}"),
        }
    }
}

fn leaf(t: &mut Terms, name: &str, at: &[Ix]) -> TermId {
    let leaf = t.leaf(name);
    t.term(Term::Leaf(leaf, at.into()))
}

/// Whether x ≥ 0, of a leaf x.
fn truth(t: &mut Terms, name: &str) -> TermId {
    let x = leaf(t, name, &[]);
    t.not_negative(x)
}

#[test]
fn terms_with_choices_are_the_same_numbers() {
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..40 {
        let mut terrain = Terrain::new(&mut rng);
        let mut seen: HashMap<TermId, Vec<f64>> = HashMap::new();
        for _ in 0..60 {
            let depth = rng.usize(1..5);
            let (id, expected) = terrain.any(&mut rng, depth);
            for (point, expected) in terrain.points.iter().zip(&expected) {
                let found = terrain.value(id, point);
                let size = 1.0 + expected.abs();
                assert!((found - expected).abs() < 1e-6 * size, "{found} {expected}");
            }
            // A truth is one.
            if terrain.t.is_truth(id) {
                assert!(expected.iter().all(|x| *x == 0.0 || *x == 1.0));
            }
            let before = seen.entry(id).or_insert_with(|| expected.clone());
            assert!(
                before.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6 * (1.0 + b.abs()))
            );
        }
    }
}

#[test]
fn a_product_does_not_depend_on_the_order_of_its_factors() {
    let mut rng = fastrand::Rng::with_seed(3);
    for n in 1..40 {
        let mut terrain = Terrain::new(&mut rng);
        let mut factors: Vec<TermId> = (0..n % 10)
            .map(|_| {
                let (literal, _) = terrain.literal(&mut rng);
                match rng.u32(..3) {
                    0 => terrain.t.sum(&[(literal, 1.5)], 0.5),
                    _ => literal,
                }
            })
            .collect();
        factors.extend([terrain.leaves[4], terrain.leaves[5]]);
        let multiplied = |t: &mut Terms, factors: &[TermId]| {
            factors.iter().fold(t.constant(1.0), |product, f| t.mul(product, *f))
        };
        let first = multiplied(&mut terrain.t, &factors);
        for _ in 0..5 {
            rng.shuffle(&mut factors);
            assert_eq!(multiplied(&mut terrain.t, &factors), first);
            let (left, right) = factors.split_at(factors.len() / 2);
            let [left, right] = [left, right].map(|f| multiplied(&mut terrain.t, f));
            assert_eq!(terrain.t.mul(left, right), first);
        }
    }
}

#[test]
fn what_is_multiplied_out_is_the_product() {
    let mut t = Terms::default();
    let [x, y] = ["x", "y"].map(|name| leaf(&mut t, name, &[]));
    let sum_of_both = t.add(x, y);
    for of in [x, sum_of_both] {
        for n in 1..=4 {
            let (mut product, mut sum) = (of, of);
            for k in 0..n {
                let truth = truth(&mut t, &format!("c{k}"));
                // (1 − c)·… and … − c·…; of the third, ½ + c.
                let (a, b) = if k == 2 { (0.5, 1.0) } else { (1.0, -1.0) };
                let factor = t.sum(&[(truth, b)], a);
                product = t.mul(product, factor);
                let other = t.mul(truth, sum);
                sum = t.sum(&[(sum, a), (other, b)], 0.0);
            }
            assert_eq!(product, sum);
            // Also within a sum, and of what is left of one.
            let more = t.add(product, y);
            assert_eq!(t.sub(more, y), product);
            assert_ne!(more, product);
        }
    }
}

#[test]
fn a_truth_and_its_negation_are_one() {
    let mut t = Terms::default();
    let x = leaf(&mut t, "x", &[]);
    let literals: Vec<TermId> = (0..12)
        .map(|k| {
            let truth = truth(&mut t, &format!("c{k}"));
            if k % 2 == 0 { truth } else { t.not(truth) }
        })
        .collect();
    let all: Vec<(TermId, f64)> = literals.iter().map(|l| (*l, 1.0)).collect();
    let all = t.product(&all);
    let of_all = t.mul(all, x);
    for literal in literals {
        let not = t.not(literal);
        assert_eq!(t.mul(literal, not), t.constant(0.0));
        assert_eq!(t.mul(of_all, not), t.constant(0.0));
        assert_eq!(t.mul(of_all, literal), of_all);
        assert_eq!(t.power(literal, 0.5), literal);
        assert_eq!(t.not(not), literal);
    }
    let d = truth(&mut t, "d");
    let not = t.not(d);
    let [a, b] = [d, not].map(|c| t.mul(of_all, c));
    assert_ne!(a, b);
    assert_eq!(t.add(a, b), of_all);
    assert!(t.is_truth(all));
    let not_all = t.not(all);
    assert!(t.is_truth(not_all));
    assert_eq!(t.not(not_all), all);
}

/// Terms of a chain of so many layers, of which each has a choice of its element and another factor of it: those of the last element,
/// and of the gradient of every weight.
fn of_chain(layers: usize, other: f64) -> usize {
    let mut t = Terms::default();
    let mut h = leaf(&mut t, "h", &[]);
    let mut passed = vec![];
    for n in 0..layers {
        let [w, b] = ["w", "b"].map(|name| leaf(&mut t, &format!("{name}{n}"), &[]));
        let product = t.mul(h, w);
        let a = t.add(product, b);
        let minus = t.scale(a, -1.0);
        let not = t.not_negative(minus);
        let positive = t.not(not);
        passed.push((positive, h, w));
        let scaled = t.scale(a, other);
        h = t.select(positive, a, scaled);
    }
    let mut gradient = t.constant(1.0);
    for (positive, h, w) in passed.into_iter().rev() {
        let scaled = t.scale(gradient, other);
        gradient = t.select(positive, gradient, scaled);
        t.mul(gradient, h);
        gradient = t.mul(gradient, w);
    }
    t.number_of_terms()
}

#[test]
fn chains_of_choices_have_as_many_terms_as_layers() {
    for other in [0.0, 0.25] {
        let (few, many) = (of_chain(20, other), of_chain(40, other));
        assert!(few < 20 * 40 && many < 3 * few, "{few} {many}");
    }
    // Of selections alone.
    let of_selects = |n: usize| {
        let mut t = Terms::default();
        let (mut x, zero) = (leaf(&mut t, "x", &[]), t.constant(0.0));
        for k in 0..n {
            let condition = truth(&mut t, &format!("c{k}"));
            x = t.select(condition, zero, x);
        }
        t.number_of_terms()
    };
    let (few, many) = (of_selects(20), of_selects(40));
    assert!(many < 3 * few, "{few} {many}");
}
