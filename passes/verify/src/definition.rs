//! Definitions: reductions, and operations that are not written out, as functions of indices with canonical names of variables.

use crate::index::{ANY, Affine, Atom, Ix, Kind, SIGNED, Var};
use crate::integer::is_integer;
use crate::name::NAME;
use crate::part::Part;
use crate::term::{Algebra, Definition, Number, Term, TermId, Terms};
use frit_ir::{Op, TensorType};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};

/// So many constants, or indices that differ by constants, are arguments each.
const FEW_PLACES: usize = 4;

/// An index, and the variable that stands for it in a definition.
type Place = (Ix, Var);

/// Part of a variable that is split: a variable of its own, if it has more than one value, and that as an index.
type Split = (Option<Var>, Ix);

impl Terms {
    /// A variable that nothing else uses.
    pub(crate) fn fresh(&mut self, extent: u64) -> Var {
        self.next_fresh += 1;
        Var { kind: Kind::Fresh, number: self.next_fresh, extent }
    }

    /// The index of an axis that is reduced.
    pub(crate) fn fresh_index(&mut self, extent: usize) -> (Option<Var>, Ix) {
        if extent == 1 {
            return (None, self.constant_index(0));
        }
        let var = self.fresh(extent as u64);
        (Some(var), self.atom(Atom::Var(var)))
    }

    /// Σ of a term over variables.
    pub(crate) fn sum_over(&mut self, term: TermId, over: &[Var]) -> TermId {
        over.iter().fold(term, |term, var| self.sum_over_one(term, *var))
    }

    fn sum_over_one(&mut self, term: TermId, over: Var) -> TermId {
        if self.vars_of(term).binary_search(&over).is_err() {
            return self.scale(term, over.extent as f64);
        }
        if let Some(found) = self.exhausted().or(self.sums.get(&(term, over)).copied()) {
            return found;
        }
        let sum = self.new_sum_over(term, over);
        self.sums.insert((term, over), sum);
        sum
    }

    fn new_sum_over(&mut self, term: TermId, over: Var) -> TermId {
        // Of choices along the variable the parts are summed; what is left of the axis is seen only where bounds are factors.
        let depends = |t: &Terms, p: TermId| t.vars_of(p).binary_search(&over).is_ok();
        let is_bound = |t: &Terms, p: TermId| depends(t, p) && t.is_of_bounds(p);
        let written = match self.written_as_sum(term, depends) {
            Some(parts) => Some(parts),
            None => self.written_as_sum(term, is_bound),
        };
        if let Some(mut parts) = written {
            for (part, _) in &mut parts {
                *part = self.sum_over_one(*part, over);
            }
            return self.sum(&parts, 0.0);
        }
        let factors = match self.get(term).clone() {
            Term::Sum(parts, constant) => {
                let mut sums: Vec<(TermId, f64)> = vec![];
                for (part, factor) in parts.iter() {
                    sums.push((self.sum_over_one(*part, over), factor.value()));
                }
                return self.sum(&sums, constant.value() * over.extent as f64);
            }
            Term::Product(factors) => factors.to_vec(),
            _ => vec![(term, Number::ONE)],
        };
        let (mut inside, mut outside) = (vec![], vec![]);
        for (factor, exponent) in factors {
            let depends = self.vars_of(factor).binary_search(&over).is_ok();
            if depends { &mut inside } else { &mut outside }.push((factor, exponent.value()));
        }
        if outside.is_empty() {
            return match self.restricted(&inside, over) {
                Some(sum) => sum,
                None => self.sum_of_product(&inside, over),
            };
        }
        let inside = self.product(&inside);
        outside.push((self.sum_over_one(inside, over), 1.0));
        self.product(&outside)
    }

    /// The sum where a factor is the truth of i ≥ c, or of i ≤ c: over what is left of the axis.
    fn restricted(&mut self, inside: &[(TermId, f64)], over: Var) -> Option<TermId> {
        for (k, &(factor, exponent)) in inside.iter().enumerate() {
            if exponent < 0.0 {
                continue;
            }
            let Term::NotNegative(ix) = *self.get(factor) else { continue };
            let Affine { atoms, constant } = self.affine(ix).clone();
            let &[(Atom::Var(v), factor)] = &atoms[..] else { continue };
            if v != over || factor.abs() != 1 {
                continue;
            }
            // i ≥ −constant, or i ≤ constant.
            let (low, high) = match factor {
                1 => (-constant, over.extent as i64),
                _ => (0, constant + 1),
            };
            let rest: Vec<(TermId, f64)> =
                inside.iter().enumerate().filter(|(i, _)| *i != k).map(|(_, f)| *f).collect();
            let rest = self.product(&rest);
            let (var, at) = self.fresh_index((high - low).max(1) as usize);
            let at = self.offset(at, low);
            let rest = self.substitute(rest, vec![(over, at)]);
            return Some(match var {
                None => rest,
                Some(var) => self.sum_over_one(rest, var),
            });
        }
        None
    }

    fn sum_of_product(&mut self, inside: &[(TermId, f64)], over: Var) -> TermId {
        let body = self.product(inside);
        // Multiplication may have made a sum of it, or something that no longer depends on the variable.
        if matches!(self.get(body), Term::Sum(..))
            || self.vars_of(body).binary_search(&over).is_err()
        {
            return self.sum_over_one(body, over);
        }
        if let Some((parts, sizes)) = self.split_of(body, over) {
            let place = self.place(&sizes, &parts.iter().map(|(_, ix)| *ix).collect::<Vec<_>>());
            let body = self.substitute(body, vec![(over, place)]);
            let vars: Vec<Var> = parts.into_iter().filter_map(|(v, _)| v).collect();
            return self.sum_over(body, &vars);
        }
        let (mut bound, mut body) = (vec![over], body);
        // A sum of sums is one over all variables.
        if let Term::Defined(id, at) = self.get(body).clone()
            && let Definition::Reduce { by: "sum", bound: inner, body: of } =
                self.definitions[id as usize].clone()
        {
            let (opened, vars) = self.opened(of, &inner, &at);
            bound.extend(vars);
            body = opened;
        }
        self.reduction("sum", body, &bound)
    }

    /// The body of a definition applied to these arguments, with fresh variables for those that it binds.
    pub(crate) fn opened(&mut self, body: TermId, bound: &[u64], at: &[Ix]) -> (TermId, Vec<Var>) {
        let mut pairs: Vec<(Var, Ix)> = vec![];
        let used: Vec<Var> = self.vars_of(body).to_vec();
        for var in used.iter().filter(|v| v.kind == Kind::Argument) {
            pairs.push((*var, at[var.number as usize]));
        }
        let mut fresh = vec![];
        for (k, extent) in bound.iter().enumerate() {
            let var = self.fresh(*extent);
            let ix = self.atom(Atom::Var(var));
            pairs.push((Var { kind: Kind::Bound, number: k as u32, extent: *extent }, ix));
            fresh.push(var);
        }
        (self.substitute(body, pairs), fresh)
    }

    /// Where a variable is only ever divided: variables for quotient and remainder, and their extents.
    fn split_of(&mut self, body: TermId, over: Var) -> Option<(Vec<Split>, Vec<usize>)> {
        let divisors = self.divisors(body, over)?;
        let n = *divisors.first()?;
        let extent = over.extent as i64;
        if extent % n != 0 || divisors.iter().any(|d| d % n != 0) || n == extent {
            return None;
        }
        let sizes = vec![(extent / n) as usize, n as usize];
        let parts = sizes.iter().map(|n| self.fresh_index(*n)).collect();
        Some((parts, sizes))
    }

    /// By what the variable is divided; none if it occurs otherwise.
    fn divisors(&self, body: TermId, over: Var) -> Option<BTreeSet<i64>> {
        let alone = Affine { atoms: vec![(Atom::Var(over), 1)], constant: 0 };
        let mut found = BTreeSet::new();
        let is_part = |part: Part| match part {
            Part::Term(id) => self.vars_of(id).binary_search(&over).is_ok(),
            Part::Index(ix) => *self.affine(ix) != alone,
            Part::Var(var) => var == over,
        };
        for part in self.parts_within(Part::Term(body), is_part) {
            let Part::Index(ix) = part else { continue };
            for &(atom, _) in &self.affine(ix).atoms {
                match atom {
                    Atom::Var(var) if var == over => return None,
                    Atom::Div(of, n) | Atom::Mod(of, n) if *self.affine(of) == alone => {
                        found.insert(n);
                    }
                    _ => {}
                }
            }
        }
        Some(found)
    }

    /// A reduction of a term over variables that occur in it, applied to its other variables.
    pub(crate) fn reduction(&mut self, by: &'static str, body: TermId, over: &[Var]) -> TermId {
        if let Some(none) = self.exhausted() {
            return none;
        }
        let bits = self.algebra == Algebra::Bits;
        // Where bits are compared, it matters how often something is added, and in which order.
        let depends = |v: &Var| self.vars_of(body).binary_search(v).is_ok();
        let over: Vec<Var> = over.iter().copied().filter(|v| bits || depends(v)).collect();
        if over.is_empty() && by != NAME {
            return body;
        }
        // Variables for the moment have the names that they have in other definitions, so that what was made of these is found again.
        let vars = self.vars_of(body).iter().chain(&over).filter(|v| v.kind == Kind::Fresh);
        let used = vars.map(|v| v.number).max().unwrap_or(0);
        let next_fresh = std::mem::replace(&mut self.next_fresh, used);
        let mut arguments = Arguments { bound: &over, places: vec![], seen: FxHashMap::default() };
        let body = arguments.abstracted(self, body);
        let (body, mut places) = self.joined(body, arguments.places);
        // That an index may be negative is told apart only where it makes a difference.
        let bounded = self.bounded(body);
        let mut positive = vec![];
        for (_, var) in places.iter_mut().filter(|(_, var)| var.extent == SIGNED) {
            let (from, to) = (*var, self.fresh(ANY));
            let [before, after] = [from, to].map(|v| self.atom(Atom::Var(v)));
            if bounded.contains(&from) {
                let other = self.substitute(body, vec![(from, after)]);
                if self.substitute(other, vec![(to, before)]) != body {
                    continue;
                }
            }
            *var = to;
            positive.push((from, after));
        }
        let body = self.substitute(body, positive);
        // A sum in the body, which is now of other variables, may have another sign.
        let (factor, body) =
            if ["sum", NAME].contains(&by) { self.content(body) } else { (1.0, body) };
        let (order, tied) = self.canonical_order(body, &over, &places, 0);
        let (named, bound, at) = self.named(body, &order, &over, &places);
        let definition = self.define(Definition::Reduce { by, bound, body: named });
        if tied {
            // Either may be the first.
            let (order, _) = self.canonical_order(body, &over, &places, 1);
            let (same, _, other) = self.named(body, &order, &over, &places);
            let place = |ix: &Ix| at.iter().position(|o| o == ix);
            let order: Option<Vec<usize>> = other.iter().map(place).collect();
            let order = order.filter(|o| o.iter().enumerate().all(|(k, to)| o[*to] == k));
            self.symmetries.extend(order.filter(|_| same == named).map(|o| (definition, o)));
        }
        self.next_fresh = next_fresh;
        let reduced = self.defined(definition, at);
        self.scale(reduced, factor)
    }

    /// A body and the places that its variables stand for. Of many that are the same index but for constants one is left, and of many
    /// constants none: each step of a recurrence may read another element, or those beside what the step before reads.
    fn joined(&mut self, body: TermId, places: Vec<Place>) -> (TermId, Vec<Place>) {
        let mut alike: BTreeMap<_, Vec<(i64, Place)>> = BTreeMap::new();
        for place in places {
            let Affine { atoms, constant } = self.affine(place.0).clone();
            alike.entry(atoms).or_default().push((constant, place));
        }
        let (mut pairs, mut places) = (vec![], vec![]);
        for (atoms, mut group) in alike {
            group.sort_unstable();
            if group.len() <= FEW_PLACES {
                places.extend(group.into_iter().map(|(_, place)| place));
                continue;
            }
            let (least, first) = group[0];
            let base = match atoms.is_empty() {
                true => self.constant_index(least),
                false => self.atom(Atom::Var(first.1)),
            };
            places.extend((!atoms.is_empty()).then_some(first));
            for (constant, (_, var)) in group {
                pairs.push((var, self.offset(base, constant - least)));
            }
        }
        (self.substitute(body, pairs), places)
    }

    /// The body of a definition whose variables are named in this order, the extents of those that are bound, and the places that the
    /// others stand for.
    fn named(
        &mut self,
        body: TermId,
        order: &[Var],
        over: &[Var],
        places: &[(Ix, Var)],
    ) -> (TermId, Vec<u64>, Vec<Ix>) {
        let (mut pairs, mut bound, mut at) = (vec![], vec![], vec![]);
        for &var in order {
            let name = if over.contains(&var) {
                bound.push(var.extent);
                Var { kind: Kind::Bound, number: bound.len() as u32 - 1, extent: var.extent }
            } else {
                let place = places.iter().find(|(_, v)| *v == var);
                at.push(place.expect("invariant: every free variable stands for an index").0);
                Var { kind: Kind::Argument, number: at.len() as u32 - 1, extent: var.extent }
            };
            pairs.push((var, self.atom(Atom::Var(name))));
        }
        (self.substitute(body, pairs), bound, at)
    }

    /// The variables whose range makes a difference: of what is divided, or is a bound.
    fn bounded(&self, body: TermId) -> FxHashSet<Var> {
        let mut found = FxHashSet::default();
        for part in self.parts_within(Part::Term(body), |_| true) {
            match part {
                Part::Term(id) => {
                    if let Term::NotNegative(ix) = self.get(id) {
                        found.extend(self.vars_of_index(*ix).iter());
                    }
                }
                Part::Index(ix) => {
                    for &(atom, _) in &self.affine(ix).atoms {
                        if let Atom::Div(of, _) | Atom::Mod(of, _) = atom {
                            found.extend(self.vars_of_index(of).iter());
                        }
                    }
                }
                Part::Var(_) => {}
            }
        }
        found
    }

    /// The results of an operation that is not written out, over the axes of each.
    pub(crate) fn opaque(
        &mut self,
        op: &Op,
        result: usize,
        operands: &[(TermId, Vec<usize>)],
        ty: &TensorType,
    ) -> TermId {
        let mut operands = operands.to_vec();
        let mut at = self.axes(ty.shape.dims());
        let outside: Vec<Var> = operands
            .iter()
            .flat_map(|(t, _)| self.vars_of(*t).iter().filter(|v| v.kind != Kind::Axis).copied())
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        for var in outside {
            at.push(self.atom(Atom::Var(var)));
            let name =
                Var { kind: Kind::Argument, number: at.len() as u32 - 1, extent: var.extent };
            let name = self.atom(Atom::Var(name));
            for (term, _) in &mut operands {
                *term = self.substitute(*term, vec![(var, name)]);
            }
        }
        let op = Box::new(op.clone());
        let is_integer = is_integer(ty.dtype);
        let definition = self.define(Definition::Opaque { op, result, is_integer, operands });
        self.term(Term::Defined(definition, at.into()))
    }
}

/// Makes arguments of a reduction's body: what of an index does not depend on bound variables becomes a variable, so that the
/// definition does not depend on where its elements are.
struct Arguments<'a> {
    bound: &'a [Var],
    places: Vec<Place>,
    seen: FxHashMap<TermId, TermId>,
}

impl Arguments<'_> {
    fn abstracted(&mut self, t: &mut Terms, id: TermId) -> TermId {
        if let Some(found) = self.seen.get(&id) {
            return *found;
        }
        let result = match t.get(id).clone() {
            Term::Number(_) => id,
            Term::Index(ix) => {
                let ix = self.index(t, ix);
                t.index_term(ix)
            }
            Term::NotNegative(ix) => {
                let ix = self.index(t, ix);
                t.term(Term::NotNegative(ix))
            }
            Term::Leaf(leaf, at) => {
                let at = at.iter().map(|ix| self.index(t, *ix)).collect();
                t.term(Term::Leaf(leaf, at))
            }
            Term::Defined(definition, at) => {
                let at = at.iter().map(|ix| self.index(t, *ix)).collect();
                t.defined(definition, at)
            }
            Term::Sum(parts, constant) => {
                let parts: Vec<(TermId, f64)> =
                    parts.iter().map(|(p, f)| (self.part(t, *p), f.value())).collect();
                t.sum(&parts, constant.value())
            }
            Term::Product(factors) => {
                let factors: Vec<(TermId, f64)> =
                    factors.iter().map(|(p, e)| (self.part(t, *p), e.value())).collect();
                t.product(&factors)
            }
            Term::Apply(function, operands) => {
                let operands: Vec<TermId> = operands.iter().map(|p| self.part(t, *p)).collect();
                t.applied(function, &operands)
            }
        };
        self.seen.insert(id, result);
        result
    }

    /// A part of the body, by its name if it has one.
    fn part(&mut self, t: &mut Terms, id: TermId) -> TermId {
        let id = t.within_definition(id);
        self.abstracted(t, id)
    }

    fn index(&mut self, t: &mut Terms, ix: Ix) -> Ix {
        let Affine { atoms, constant } = t.affine(ix).clone();
        let (mut free, mut rest) = (Affine { atoms: vec![], constant }, vec![]);
        for (atom, factor) in atoms {
            let alone = t.atom(atom);
            let depends = t.vars_of_index(alone).iter().any(|v| self.bound.contains(v));
            if depends { &mut rest } else { &mut free.atoms }.push((atom, factor));
        }
        let mut sum = match free.atoms.is_empty() && !rest.is_empty() {
            true => t.constant_index(constant),
            false => {
                let free = t.affine_sum(free);
                self.place(t, free)
            }
        };
        for (atom, factor) in rest {
            let part = match atom {
                Atom::Var(_) => t.atom(atom),
                Atom::Div(of, n) => {
                    let of = self.index(t, of);
                    t.div(of, n)
                }
                Atom::Mod(of, n) => {
                    let of = self.index(t, of);
                    t.modulo(of, n)
                }
                Atom::Data(term) => {
                    let term = self.abstracted(t, term);
                    t.atom(Atom::Data(term))
                }
            };
            let part = t.times(part, factor);
            sum = t.plus(sum, part);
        }
        sum
    }

    fn place(&mut self, t: &mut Terms, free: Ix) -> Ix {
        let known = self.places.iter().find(|(ix, _)| *ix == free).map(|(_, var)| *var);
        let var = match known {
            Some(var) => var,
            None => {
                let var = t.fresh(if t.range(free).0 < 0 { SIGNED } else { ANY });
                self.places.push((free, var));
                var
            }
        };
        t.atom(Atom::Var(var))
    }
}
