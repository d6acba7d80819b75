//! What the bytes of the arenas hold while the tasks are executed symbolically.

use super::flat::{Flat, Piece, Table, What};
use crate::unstated::Unstated;
use frit_ir::plan::{Arena, Buffer, BufferId, Place, Plan};
use frit_ir::{DType, Origin, ValueId};
use rangemap::RangeMap;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

/// What a write left in its bytes.
#[derive(Clone, Debug)]
pub(super) enum Held {
    /// A value of this dtype, dense.
    Value(ValueId, DType),
    /// Zeros of any dtype.
    Zero,
    /// What is not known.
    Unknown,
    /// The part of a flat tensor that a rank has, or keeps among as many consecutive ranks.
    Part(Rc<Flat>),
    /// A table, from one of its rows on.
    Table(Table),
}

/// What a place holds.
pub(super) enum Content {
    /// A whole, or a rank's part of one.
    Flat(Rc<Flat>),
    /// A table from this row on.
    Table(Table, usize),
}

/// Bytes that one write left, and where its first byte was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    held: usize,
    origin: isize,
}

/// The bytes of all arenas.
pub(super) struct Memory<'a> {
    plan: &'a Plan,
    maps: Vec<RangeMap<usize, Written>>,
    held: Vec<Held>,
    /// Writes before this one were there when the phases that repeat began.
    begun: Option<usize>,
    /// What these phases read of earlier writes.
    live_in: Vec<(usize, Range<usize>, Written)>,
    /// The buffers that are read outside of them.
    read: BTreeSet<BufferId>,
    /// What the bytes of leaves hold that no task may replace.
    fixed: Vec<(BufferId, Written)>,
}

fn refuse(what: String) -> Unstated {
    Unstated::new("memory", &Origin::none(), what)
}

impl<'a> Memory<'a> {
    pub(super) fn new(plan: &'a Plan) -> Memory<'a> {
        Memory {
            plan,
            maps: vec![RangeMap::new(); Arena::ALL.len()],
            held: vec![],
            begun: None,
            live_in: vec![],
            read: BTreeSet::new(),
            fixed: vec![],
        }
    }

    /// The arena of a buffer, and the byte there at which an offset of it is.
    fn address(&self, buffer: BufferId, offset: usize) -> (usize, usize) {
        let Buffer { arena, offset: base, .. } = &self.plan.buffers[buffer];
        (*arena as usize, base + offset)
    }

    /// Puts this into a range of bytes that begins so many bytes behind the first of it.
    pub(super) fn put(
        &mut self,
        buffer: BufferId,
        (offset, bytes): (usize, usize),
        held: Held,
        skipped: usize,
    ) {
        if bytes == 0 {
            return;
        }
        let (map, begin) = self.address(buffer, offset);
        let written = Written { held: self.held.len(), origin: begin as isize - skipped as isize };
        self.held.push(held);
        self.maps[map].insert(begin..begin + bytes, written);
    }

    /// Puts this into a whole buffer, where no task may change it.
    pub(super) fn fix(&mut self, buffer: BufferId, held: Held) {
        let bytes = self.plan.buffers[buffer].bytes;
        let (_, begin) = self.address(buffer, 0);
        let written = Written { held: self.held.len(), origin: begin as isize };
        self.fixed.push((buffer, written));
        self.put(buffer, (0, bytes), held, 0);
    }

    /// Writes the elements of a tensor to a place, or a rank's part of them.
    pub(super) fn write(&mut self, place: &Place, flat: &Rc<Flat>) -> Result<(), Unstated> {
        if place.ty.dtype != flat.dtype || place.ty.shape.numel() * flat.shards != flat.numel {
            return Err(refuse(format!(
                "a result of {} elements is written as {}",
                flat.numel, place.ty
            )));
        }
        if flat.shards > 1 {
            let held = Held::Part(flat.clone());
            self.put(place.buffer, (place.offset, place.ty.bytes()), held, 0);
            return Ok(());
        }
        let size = flat.dtype.size();
        for piece in &flat.pieces {
            let (held, skipped) = match piece.what {
                What::Of(value, from) => (Held::Value(value, flat.dtype), from * size),
                What::Zero => (Held::Zero, 0),
                What::Unknown => (Held::Unknown, 0),
            };
            let range = (place.offset + piece.begin * size, piece.numel * size);
            self.put(place.buffer, range, held, skipped);
        }
        Ok(())
    }

    /// Copies bytes, whatever they hold.
    pub(super) fn copy(&mut self, from: &Place, to: &Place) -> Result<(), Unstated> {
        let bytes = from.ty.bytes();
        if bytes != to.ty.bytes() {
            return Err(refuse("a copy of another size".into()));
        }
        let (_, first) = self.address(from.buffer, from.offset);
        for (range, written) in self.written(from.buffer, (from.offset, bytes))? {
            let held = self.held[written.held].clone();
            let at = (to.offset + range.start - first, range.len());
            self.put(to.buffer, at, held, (range.start as isize - written.origin) as usize);
        }
        Ok(())
    }

    /// The writes that left a range of bytes, each with its bytes in the arena.
    fn written(
        &mut self,
        buffer: BufferId,
        (offset, bytes): (usize, usize),
    ) -> Result<Vec<(Range<usize>, Written)>, Unstated> {
        let (map, begin) = self.address(buffer, offset);
        let mut found: Vec<(Range<usize>, Written)> = vec![];
        let mut end = begin;
        for (range, written) in self.maps[map].overlapping(begin..begin + bytes) {
            let part = range.start.max(begin)..range.end.min(begin + bytes);
            if part.start != end {
                break;
            }
            end = part.end;
            found.push((part, *written));
        }
        if end != begin + bytes {
            let name = &self.plan.buffers[buffer].name;
            return Err(refuse(format!("bytes of `{name}` are read that nothing wrote")));
        }
        if self.begun.is_none() {
            self.read.insert(buffer);
        }
        if let Some(begun) = self.begun {
            let earlier = found.iter().filter(|(_, written)| written.held < begun);
            self.live_in.extend(earlier.map(|(range, written)| (map, range.clone(), *written)));
        }
        Ok(found)
    }

    /// What a place holds.
    pub(super) fn read(&mut self, place: &Place) -> Result<Content, Unstated> {
        let Place { buffer, offset, ty } = place;
        let gradients = self.plan.gradients.iter().find(|g| g.place == *place).map(|g| g.group);
        let (dtype, numel, size) = (ty.dtype, ty.shape.numel(), ty.dtype.size());
        let found = self.written(*buffer, (*offset, ty.bytes()))?;
        let (_, first) = self.address(*buffer, *offset);
        if let [(_, written)] = found[..] {
            let skipped = (first as isize - written.origin) as usize;
            match &self.held[written.held] {
                Held::Part(flat) => {
                    let is_whole = skipped == 0 && numel * flat.shards == flat.numel;
                    return match is_whole && flat.dtype == dtype {
                        true => {
                            let flat = Flat { gradients, ..Flat::clone(flat) };
                            Ok(Content::Flat(Rc::new(flat)))
                        }
                        false => Err(refuse(format!("a rank's part is read as {ty}"))),
                    };
                }
                Held::Table(table) if dtype == DType::I64 && skipped.is_multiple_of(8) => {
                    return Ok(Content::Table(*table, skipped / 8));
                }
                _ => {}
            }
        }
        let mut pieces: Vec<Piece> = vec![];
        for (range, written) in found {
            let skipped = (range.start as isize - written.origin) as usize;
            let what = match &self.held[written.held] {
                Held::Zero => What::Zero,
                Held::Unknown => What::Unknown,
                Held::Value(value, own) if *own == dtype => What::Of(*value, skipped / size),
                _ => return Err(refuse(format!("something else is read as {ty}"))),
            };
            let at = range.start - first;
            if [at, range.len(), skipped].iter().any(|bytes| !bytes.is_multiple_of(size)) {
                return Err(refuse(format!("a part of an element is read as {ty}")));
            }
            pieces.push(Piece { begin: at / size, numel: range.len() / size, what });
        }
        Ok(Content::Flat(Rc::new(Flat {
            dtype,
            numel,
            shards: 1,
            pieces,
            gradients,
            resharded: false,
        })))
    }

    /// Begins a phase that repeats. What ran before it, once, has read nothing that is another at each repetition.
    pub(super) fn begin_repeated(&mut self, changing: &[BufferId]) -> Result<(), Unstated> {
        if self.read.iter().any(|buffer| changing.contains(buffer)) {
            return Err(refuse("what is another in each micro-step is read before them".into()));
        }
        self.begun = Some(self.held.len());
        Ok(())
    }

    /// Ends it: what it read of earlier writes must still be there, but in the buffers of leaves, which say what becomes of them.
    pub(super) fn end_repeated(&mut self, leaves: &[BufferId]) -> Result<(), Unstated> {
        self.begun = None;
        let own: Vec<(usize, Range<usize>)> = (leaves.iter())
            .map(|leaf| {
                let (map, begin) = self.address(*leaf, 0);
                (map, begin..begin + self.plan.buffers[*leaf].bytes)
            })
            .collect();
        let is_own = |map: usize, range: &Range<usize>| {
            own.iter().any(|(m, own)| *m == map && own.start <= range.start && range.end <= own.end)
        };
        for (map, range, written) in std::mem::take(&mut self.live_in) {
            if is_own(map, &range) {
                continue;
            }
            let now = self.maps[map].overlapping(range.clone());
            let mut end = range.start;
            for (part, other) in now {
                if *other != written || part.start > end {
                    break;
                }
                end = part.end;
            }
            if end < range.end {
                let what = "a micro-step overwrites what the next one reads".to_string();
                return Err(refuse(what));
            }
        }
        Ok(())
    }

    /// Whether all that no task may change is as it was.
    pub(super) fn check_fixed(&self) -> Result<(), Unstated> {
        for (buffer, written) in &self.fixed {
            let (map, begin) = self.address(*buffer, 0);
            let range = begin..begin + self.plan.buffers[*buffer].bytes;
            let mut now = self.maps[map].overlapping(range.clone());
            let is_whole = |part: &Range<usize>| part.start <= range.start && part.end >= range.end;
            if !range.is_empty()
                && !now.next().is_some_and(|(part, w)| w == written && is_whole(part))
            {
                let name = &self.plan.buffers[*buffer].name;
                return Err(refuse(format!("`{name}` is overwritten")));
            }
        }
        Ok(())
    }
}
