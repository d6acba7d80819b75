//! Verifies that GEMMs and the generated kernels behind them compute the body of the kernel that launches them.
//!
//! P701  a kernel that launches only GEMMs and generated kernels computes its body, whichever
//!       candidates run, sums being in any order; if it also launches something else, its candidates
//!       leave the same values behind; no such launch overwrites an operand that it may still read
//!
//! The launches are executed on terms: the epilogue of a GEMM is what it is defined to be, a generated kernel is its
//! body. Hand-written kernels and operations of libraries are not followed: after one, memory has unknown values. Nor are
//! the GEMMs of a convolution, and those of a matmul that takes several.

use super::in_place::only_same_element;
use super::terms::{Id, Matmul, Term, Terms};
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::plan::{
    Candidate, Entry, Epilogue, Gemm, GeneratedLaunch, Kernel, KernelId, Launch, Launches, Matrix,
    Plan, Pointer, TiVec,
};
use frit_ir::{Code, DType, Diagnostic, Graph, Op};

type Followed = Result<(), String>;

/// Bytes from a pointer on.
type Range = (Pointer, usize);

pub(super) fn verify(plan: &Plan, found: &mut Vec<Diagnostic>) {
    for kernel in &plan.kernels {
        let Entry::Launches(selected) = &kernel.entry else { continue };
        let multiplies = kernel.body.nodes().any(|(_, n)| matches!(n.op, Op::MatMul(_)));
        let is_one = multiplies && selected.launches.len() == 1;
        if !is_one && !selected.launches_generated() {
            continue;
        }
        if let Err(why) = follow(plan, &kernel.body, selected) {
            let message = format!("kernel `{}`: {why}", kernel.name);
            found.push(Diagnostic::error(Code::LaunchedMeaning, message));
        }
    }
}

/// Executes the launches, and compares the results with those of the body.
fn follow(plan: &Plan, body: &Graph, selected: &Launches) -> Followed {
    let mut state = State {
        kernels: &plan.kernels,
        terms: Terms::default(),
        memory: Vec::new(),
        not_followed: 0,
    };
    state.run(&selected.launches, selected.scratch_bytes, true)?;
    if state.not_followed > 0 {
        return Ok(());
    }
    let mut operands = Vec::new();
    for (i, (dtype, numel)) in inputs(body).into_iter().enumerate() {
        operands.push(state.read(Pointer::Read(i, 0), dtype, numel)?);
    }
    let results = state.terms.body(body, &operands);
    for (i, result) in results.into_iter().enumerate() {
        let (dtype, numel) = state.terms.ty(result);
        if state.read(Pointer::Write(i, 0), dtype, numel)? != result {
            return Err(format!("its launches do not compute result {i} of its body"));
        }
    }
    Ok(())
}

/// What launches leave in the memory of a task.
struct State<'a> {
    kernels: &'a TiVec<KernelId, Kernel>,
    terms: Terms,
    /// What was written since the last launch that is not followed.
    memory: Vec<(Pointer, usize, Id)>,
    /// Launches that are not followed.
    not_followed: usize,
}

impl State<'_> {
    /// Launches whose scratch memory ends at `scratch`; nothing follows the `last`.
    fn run(&mut self, launches: &[Launch], scratch: usize, last: bool) -> Followed {
        for (i, launch) in launches.iter().enumerate() {
            match launch {
                Launch::Gemm(gemm) if is_dense(gemm) => self.gemm(gemm)?,
                Launch::Generated(launch) => self.generated(launch)?,
                Launch::Choice(candidates) if is_followed(candidates) => {
                    let last = last && i + 1 == launches.len();
                    self.choice(candidates, scratch, last)?;
                }
                _ => {
                    self.not_followed += 1;
                    self.memory.clear();
                }
            }
        }
        Ok(())
    }

    /// All candidates leave the same behind, except in scratch memory that nothing reads.
    fn choice(&mut self, candidates: &[Candidate], scratch: usize, last: bool) -> Followed {
        let (before, not_followed) = (self.memory.clone(), self.not_followed);
        let kept = if last { 0 } else { scratch };
        let mut expected: Option<Vec<(Pointer, usize, Id)>> = None;
        for candidate in candidates {
            self.memory.clone_from(&before);
            self.run(&candidate.launches, scratch + candidate.scratch_bytes, last)?;
            let name = candidate.name.word();
            if self.not_followed != not_followed {
                return Err(format!("the launches of candidate `{name}` cannot be followed"));
            }
            self.memory.retain(|(at, ..)| !matches!(at, Pointer::Scratch(at) if *at >= kept));
            let left = std::mem::take(&mut self.memory);
            let expected = expected.get_or_insert_with(|| left.clone());
            let same = left.len() == expected.len() && left.iter().all(|x| expected.contains(x));
            if !same {
                let first = candidates[0].name.word();
                return Err(format!("candidate `{name}` computes something else than `{first}`"));
            }
        }
        self.memory = expected.unwrap_or(before);
        Ok(())
    }

    fn read(&mut self, at: Pointer, dtype: DType, numel: usize) -> Result<Id, String> {
        let range = (at, numel * dtype.size());
        for &(written, bytes, id) in &self.memory {
            if (written, bytes) == range && self.terms.ty(id) == (dtype, numel) {
                return Ok(id);
            }
            if overlap((written, bytes), range) {
                return Err(format!("`{at}` is read as something else than was written"));
            }
        }
        let after = self.not_followed;
        Ok(self.terms.id(Term::Stored { after, at, dtype, numel }, dtype, numel))
    }

    fn write(&mut self, at: Pointer, id: Id) -> Followed {
        let range = self.range(at, id);
        if matches!(at, Pointer::Read(..) | Pointer::Fault) {
            return Err(format!("`{at}` is written"));
        }
        self.memory.retain(|(written, bytes, _)| (*written, *bytes) != range);
        if self.memory.iter().any(|(written, bytes, _)| overlap((*written, *bytes), range)) {
            return Err(format!("part of what was written at `{at}` is overwritten"));
        }
        self.memory.push((at, range.1, id));
        Ok(())
    }

    fn range(&self, at: Pointer, id: Id) -> Range {
        let (dtype, numel) = self.terms.ty(id);
        (at, numel * dtype.size())
    }

    fn generated(&mut self, launch: &GeneratedLaunch) -> Followed {
        let kernel = &self.kernels[launch.kernel];
        let (mut operands, mut reads, mut writes) = (Vec::new(), Vec::new(), Vec::new());
        for ((dtype, numel), at) in inputs(&kernel.body).into_iter().zip(&launch.reads) {
            let id = self.read(*at, dtype, numel)?;
            operands.push(id);
            reads.push(self.range(*at, id));
        }
        let results = self.terms.body(&kernel.body, &operands);
        writes.extend(launch.writes.iter().zip(&results).map(|(at, id)| self.range(*at, *id)));
        let scratch = launch.scratch.map(|at| (at, kernel.entry.scratch_bytes()));
        let whole = |i: usize, write: Range| {
            reads[i] == write && only_same_element(&kernel.body, i) && Some(write) != scratch
        };
        let all: Vec<Range> = writes.iter().copied().chain(scratch).collect();
        apart(&all, &reads, whole)?;
        if self.memory.iter().any(|(at, n, _)| scratch.is_some_and(|s| overlap((*at, *n), s))) {
            return Err(format!("`{}` has scratch memory where there is a value", kernel.name));
        }
        launch.writes.iter().zip(results).try_for_each(|(at, id)| self.write(*at, id))
    }

    fn gemm(&mut self, gemm: &Gemm) -> Followed {
        let Gemm { m, n, k, batch, ref a, ref b, ref d, epilogue } = *gemm;
        let (all, dtype) = (batch * m * n, d.dtype);
        let of = [self.operand(a, batch, m * k)?, self.operand(b, batch, k * n)?];
        let scales = [self.scale(a)?, self.scale(b)?];
        let mut reads = vec![self.range(a.at, of[0]), self.range(b.at, of[1])];
        let matmul = Matmul {
            sizes: [m, n, k],
            batch,
            steps: [a, b].map(|matrix| if batch == 1 { 0 } else { matrix.batch_stride }),
            transposed: [a.transposed, b.transposed],
            of,
            scales,
            out: dtype,
        };
        let matmul = self.terms.matmul(matmul);
        let mut operand = |state: &mut Self, at: Pointer, numel: usize| {
            let id = state.read(at, dtype, numel)?;
            reads.push(state.range(at, id));
            Ok::<Id, String>(id)
        };
        let (mut result, mut more) = (matmul, None);
        let mut add = |state: &mut Self, sum: Id, at: Pointer, numel: usize| {
            let id = operand(state, at, numel)?;
            let operands = [sum, id].map(|id| state.terms.over(id, all));
            Ok::<Id, String>(state.terms.sum(operands.into(), all))
        };
        match epilogue {
            Epilogue::None => {}
            Epilogue::Bias(bias) => result = add(self, result, bias, n)?,
            Epilogue::Add { matrix, bias } => {
                if let Some(bias) = bias {
                    result = add(self, result, bias, n)?;
                }
                result = add(self, result, matrix, all)?;
            }
            Epilogue::Gelu { bias, before } => {
                if let Some(bias) = bias {
                    result = add(self, result, bias, n)?;
                }
                more = before.map(|at| (at, result));
                result = self.terms.elementwise(Op::Unary(UnaryFn::GeluTanh), &[result]);
            }
            Epilogue::GeluGrad { before, rows } => {
                let before = operand(self, before, all)?;
                let op = Op::Binary(BinaryFn::GeluTanhGrad);
                result = self.terms.elementwise(op, &[result, before]);
                more = rows.map(|at| (at, self.terms.columns(result, n, dtype)));
            }
            Epilogue::SumA(at) if a.transposed => {
                more = Some((at, self.terms.columns(of[0], m, dtype)));
            }
            Epilogue::SumB(at) if !b.transposed => {
                more = Some((at, self.terms.columns(of[1], n, dtype)));
            }
            Epilogue::SumA(_) | Epilogue::SumB(_) => {
                return Err("a GEMM sums an operand along its rows".into());
            }
        }
        let writes: Vec<(Pointer, Id)> = [(d.at, result)].into_iter().chain(more).collect();
        let ranges: Vec<Range> = writes.iter().map(|(at, id)| self.range(*at, *id)).collect();
        // A matrix that is added may be where the result is.
        let is_matrix = |i: usize, write: Range| {
            let added = matches!(epilogue, Epilogue::Add { matrix, .. } if matrix == d.at);
            added && i + 1 == reads.len() && write == ranges[0]
        };
        apart(&ranges, &reads, is_matrix)?;
        writes.into_iter().try_for_each(|(at, id)| self.write(at, id))
    }

    fn operand(&mut self, matrix: &Matrix, batch: usize, one: usize) -> Result<Id, String> {
        let numel = if matrix.batch_stride == 0 { one } else { batch * one };
        self.read(matrix.at, matrix.dtype, numel)
    }

    fn scale(&mut self, matrix: &Matrix) -> Result<Option<Id>, String> {
        matrix.scale.map(|at| self.read(at, DType::F32, 1)).transpose()
    }
}

/// Whether the launches of these candidates can be followed, or have to be.
fn is_followed(candidates: &[Candidate]) -> bool {
    let is_gemm = |launch: &Launch| matches!(launch, Launch::Gemm(_));
    candidates.iter().any(launches_generated)
        || candidates.iter().flat_map(|c| &c.launches).all(is_gemm)
}

fn launches_generated(candidate: &Candidate) -> bool {
    candidate.launches.iter().any(|launch| match launch {
        Launch::Generated(_) => true,
        Launch::Choice(candidates) => candidates.iter().any(launches_generated),
        _ => false,
    })
}

/// Dtypes and elements of what a body reads.
fn inputs(body: &Graph) -> Vec<(DType, usize)> {
    let inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    let types = inputs.map(|(_, n)| body.ty(n.outputs[0]));
    types.map(|ty| (ty.dtype, ty.shape.numel())).collect()
}

/// Whether the matrices of a GEMM have no gaps; one operand may be shared by the batch.
fn is_dense(gemm: &Gemm) -> bool {
    let Gemm { m, n, k, batch, ref a, ref b, ref d, .. } = *gemm;
    let dense = |matrix: &Matrix, rows: usize, columns: usize, shared: bool| {
        let line = if matrix.transposed { rows } else { columns };
        let step = matrix.batch_stride;
        matrix.row_stride == line
            && (batch == 1 && step == 0 || step == rows * columns || shared && step == 0)
    };
    dense(a, m, k, true) && dense(b, k, n, true) && dense(d, m, n, false)
}

fn overlap((a, n): Range, (b, m): Range) -> bool {
    let same = match (a, b) {
        (Pointer::Read(i, _), Pointer::Read(j, _))
        | (Pointer::Write(i, _), Pointer::Write(j, _)) => i == j,
        (Pointer::Scratch(_), Pointer::Scratch(_)) | (Pointer::Fault, Pointer::Fault) => true,
        _ => false,
    };
    let (from, to) = (a.offset_bytes(), b.offset_bytes());
    same && from < to + m && to < from + n
}

/// Nothing is written over something else that is written, or over an operand unless that is allowed.
fn apart(writes: &[Range], reads: &[Range], allowed: impl Fn(usize, Range) -> bool) -> Followed {
    for (j, write) in writes.iter().enumerate() {
        let read = |(i, read): (usize, &Range)| overlap(*read, *write) && !allowed(i, *write);
        let twice = writes[..j].iter().any(|other| overlap(*other, *write));
        if twice || reads.iter().enumerate().any(read) {
            return Err(format!("`{}` is written while it is used", write.0));
        }
    }
    Ok(())
}
