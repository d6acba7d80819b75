//! Maps points of the iteration space to elements of a value.
//!
//! The iteration space is a list of *atoms*: factors of its dimensions, outermost first, rows before columns. A
//! [`View`] maps each dimension of a value to an affine index over atoms. Operations are evaluated at a view;
//! broadcasting, reshape, transpose, expand and slice only change the view, so they cost nothing. If a reshape must
//! split a dimension where the atoms do not, [`Stop::Cut`] requests a finer space and the analysis restarts.

use crate::error::Unsupported;
use frit_ir::Shape;
use frit_ir::ops::Slice;

/// Index of an atom in the space.
pub(crate) type Atom = usize;

/// Why an analysis stops.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Atom `.0` must be cut so that its inner part has size `.1`.
    Cut(Atom, usize),
    /// The region is not compiled.
    Unsupported(Unsupported),
}

impl From<Unsupported> for Stop {
    fn from(reason: Unsupported) -> Self {
        Stop::Unsupported(reason)
    }
}

/// Index of one dimension: `start + step · (the atoms as one mixed-radix number)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DimView {
    pub(crate) atoms: Vec<Atom>,
    pub(crate) start: i64,
    pub(crate) step: i64,
}

impl DimView {
    /// The dimension's first element, at every point.
    pub(crate) fn first() -> Self {
        DimView { atoms: Vec::new(), start: 0, step: 1 }
    }

    fn plain(atoms: Vec<Atom>) -> Self {
        DimView { atoms, start: 0, step: 1 }
    }
}

/// An index for each dimension of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct View(pub(crate) Vec<DimView>);

/// The factors of the iteration space.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    /// Size of each atom; never 1.
    pub(crate) sizes: Vec<usize>,
    /// Atoms before this one form the rows, the others the columns.
    pub(crate) n_rows: usize,
}

impl Space {
    /// The space with these row and column dimensions.
    pub(crate) fn new(rows: &[usize], cols: &[usize]) -> Self {
        let factors = |dims: &[usize]| dims.iter().copied().filter(|&d| d != 1).collect::<Vec<_>>();
        let mut sizes = factors(rows);
        let n_rows = sizes.len();
        sizes.extend(factors(cols));
        Space { sizes, n_rows }
    }

    pub(crate) fn rows(&self) -> Vec<Atom> {
        (0..self.n_rows).collect()
    }

    pub(crate) fn cols(&self) -> Vec<Atom> {
        (self.n_rows..self.sizes.len()).collect()
    }

    pub(crate) fn all(&self) -> Vec<Atom> {
        (0..self.sizes.len()).collect()
    }

    /// Number of points that these atoms span.
    pub(crate) fn extent(&self, atoms: &[Atom]) -> usize {
        atoms.iter().map(|&a| self.sizes[a]).product()
    }

    /// The same space with an atom cut in two.
    pub(crate) fn cut(&self, atom: Atom, inner: usize) -> Space {
        let mut space = self.clone();
        space.sizes[atom] /= inner;
        space.sizes.insert(atom + 1, inner);
        if atom < space.n_rows {
            space.n_rows += 1;
        }
        space
    }

    /// Distributes atoms, in order, over dimensions.
    pub(crate) fn group(&self, atoms: &[Atom], dims: &[usize], op: &str) -> Result<View, Stop> {
        let misfit = || Stop::from(Unsupported::new(op, "its shape does not fit the region's"));
        let mut rest = atoms.to_vec();
        let mut views = Vec::with_capacity(dims.len());
        for &dim in dims.iter().rev() {
            let (mut need, mut taken) = (dim, Vec::new());
            while need > 1 {
                let atom = rest.pop().ok_or_else(misfit)?;
                let size = self.sizes[atom];
                if need.is_multiple_of(size) {
                    need /= size;
                    taken.insert(0, atom);
                } else if size.is_multiple_of(need) {
                    return Err(Stop::Cut(atom, need));
                } else {
                    return Err(misfit());
                }
            }
            views.push(DimView::plain(taken));
        }
        if !rest.is_empty() {
            return Err(misfit());
        }
        views.reverse();
        Ok(View(views))
    }

    /// The view of an operand of shape `from` whose reshaped result, of shape `to`, is seen at `view`.
    pub(crate) fn reshape(&self, view: &View, to: &Shape, from: &Shape) -> Result<View, Stop> {
        let mut atoms = Vec::new();
        for (dim, &size) in view.0.iter().zip(to.dims()) {
            if dim.start != 0 || dim.step != 1 || self.extent(&dim.atoms) != size {
                let why = "it reshapes part of a computed value";
                return Err(Unsupported::new("reshape", why).into());
            }
            atoms.extend(&dim.atoms);
        }
        self.group(&atoms, from.dims(), "reshape")
    }

    /// The element offset of a dense tensor of this shape at `view`, as an affine form.
    pub(crate) fn offset(&self, view: &View, shape: &Shape) -> Affine {
        let mut affine = Affine { constant: 0, strides: vec![0; self.sizes.len()] };
        for (dim, stride) in view.0.iter().zip(shape.strides()) {
            let stride = stride as i64;
            affine.constant += dim.start * stride;
            let mut weight = dim.step * stride;
            for &atom in dim.atoms.iter().rev() {
                affine.strides[atom] += weight;
                weight *= self.sizes[atom] as i64;
            }
        }
        affine
    }
}

impl View {
    /// The view of an operand of shape `from` that broadcasts to the shape `to` seen at `self`.
    pub(crate) fn broadcast(&self, to: &Shape, from: &Shape) -> View {
        let missing = to.rank() - from.rank();
        let dims = (0..from.rank()).map(|i| match from.0[i] == to.0[i + missing] {
            true => self.0[i + missing].clone(),
            false => DimView::first(),
        });
        View(dims.collect())
    }

    /// The view of the operand of a transpose.
    pub(crate) fn transpose(&self, perm: &[usize]) -> View {
        let mut dims = vec![DimView::first(); perm.len()];
        for (view, &p) in self.0.iter().zip(perm) {
            dims[p] = view.clone();
        }
        View(dims)
    }

    /// The view of the operand of a slice.
    pub(crate) fn slice(&self, slice: &Slice) -> View {
        let dims = self.0.iter().enumerate().map(|(i, dim)| {
            let step = slice.step[i] as i64;
            DimView {
                atoms: dim.atoms.clone(),
                start: slice.start[i] as i64 + dim.start * step,
                step: dim.step * step,
            }
        });
        View(dims.collect())
    }

    /// The view of an operand of which `self` views the part starting at `start` along `axis`.
    pub(crate) fn shifted(&self, axis: usize, start: usize) -> View {
        let mut view = self.clone();
        view.0[axis].start += start as i64;
        view
    }
}

/// An integer that depends linearly on the point: `constant + Σ strides[a] · index of atom a`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Affine {
    pub(crate) constant: i64,
    /// One per atom.
    pub(crate) strides: Vec<i64>,
}

impl Affine {
    /// Whether the atoms `a` and `a + 1` are equivalent to one of size `sizes[a] · sizes[a + 1]`.
    pub(crate) fn joins(&self, a: Atom, sizes: &[usize]) -> bool {
        self.strides[a] == self.strides[a + 1] * sizes[a + 1] as i64
    }

    /// The form after `a` and `a + 1` became one atom.
    pub(crate) fn join(&mut self, a: Atom) {
        self.strides.remove(a);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reshape_that_cuts_a_dimension_asks_for_it() {
        let space = Space::new(&[6], &[8]);
        let Err(Stop::Cut(0, 3)) = space.group(&[0, 1], &[2, 3, 8], "reshape") else {
            panic!("no cut")
        };
        let finer = space.cut(0, 3);
        assert_eq!((finer.sizes.clone(), finer.n_rows), (vec![2, 3, 8], 2));
        let view = finer.group(&finer.all(), &[2, 24], "reshape").unwrap();
        assert_eq!(view.0[1].atoms, [1, 2]);
    }

    #[test]
    fn offsets_follow_transpose_slice_and_broadcast() {
        let space = Space::new(&[2, 3], &[4]);
        let whole = space.group(&space.all(), &[2, 3, 4], "x").unwrap();
        // An operand [4, 1, 2·2 + 1], sliced to every second of its last axis and transposed.
        let view = whole.broadcast(&Shape::from([2, 3, 4]), &Shape::from([2, 1, 4]));
        let slice = Slice { start: vec![0, 0, 1], size: vec![4, 1, 2], step: vec![1, 1, 2] };
        let view = view.transpose(&[2, 1, 0]).slice(&slice);
        let offset = space.offset(&view, &Shape::from([4, 1, 5]));
        assert_eq!(offset, Affine { constant: 1, strides: vec![2, 0, 5] });
    }
}
