//! Mutations that keep a protobuf message well-formed: fields are changed, dropped, duplicated and exchanged at any
//! depth, without a schema, and lengths are recomputed.

use super::{bytes, changes, number, pick};
use crate::machine::Random;

/// Messages within messages are looked into this far.
const DEPTH: usize = 12;

#[derive(Clone)]
enum Payload {
    Varint(u64),
    /// Four or eight bytes.
    Fixed(Vec<u8>),
    Bytes(Vec<u8>),
    Message(Vec<Field>),
}

#[derive(Clone)]
struct Field {
    number: u64,
    payload: Payload,
}

/// Makes a few changes, some with fields of another message; changes bytes if they are no message.
pub(in crate::fuzz) fn change(random: &mut Random, message: &mut Vec<u8>, other: &[u8]) {
    let Some(mut fields) = parse(message, DEPTH) else {
        return bytes::change(random, message, other);
    };
    let other = parse(other, DEPTH).unwrap_or_default();
    for _ in 0..changes(random) {
        once(random, &mut fields, &other);
    }
    message.clear();
    write(&fields, message);
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn take<'a>(bytes: &mut &'a [u8], n: u64) -> Option<&'a [u8]> {
    let (head, rest) = bytes.split_at_checked(n.try_into().ok()?)?;
    *bytes = rest;
    Some(head)
}

fn parse(mut bytes: &[u8], depth: usize) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let payload = match tag & 7 {
            0 => Payload::Varint(varint(&mut bytes)?),
            1 => Payload::Fixed(take(&mut bytes, 8)?.to_vec()),
            5 => Payload::Fixed(take(&mut bytes, 4)?.to_vec()),
            2 => {
                let length = varint(&mut bytes)?;
                let inner = take(&mut bytes, length)?;
                let is_text = inner.iter().all(|b| (0x20..0x7f).contains(b));
                let nested = (depth > 0 && !is_text).then(|| parse(inner, depth - 1)).flatten();
                nested.map_or_else(|| Payload::Bytes(inner.to_vec()), Payload::Message)
            }
            _ => return None,
        };
        if tag >> 3 == 0 {
            return None;
        }
        fields.push(Field { number: tag >> 3, payload });
    }
    Some(fields)
}

fn write_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn write(fields: &[Field], out: &mut Vec<u8>) {
    for Field { number, payload } in fields {
        let wire = match payload {
            Payload::Varint(_) => 0,
            Payload::Fixed(bytes) if bytes.len() == 8 => 1,
            Payload::Fixed(_) => 5,
            Payload::Bytes(_) | Payload::Message(_) => 2,
        };
        write_varint(number << 3 | wire, out);
        match payload {
            Payload::Varint(value) => write_varint(*value, out),
            Payload::Fixed(bytes) => out.extend(bytes),
            Payload::Bytes(bytes) => {
                write_varint(bytes.len() as u64, out);
                out.extend(bytes);
            }
            Payload::Message(inner) => {
                let mut bytes = Vec::new();
                write(inner, &mut bytes);
                write_varint(bytes.len() as u64, out);
                out.extend(bytes);
            }
        }
    }
}

/// All payloads of text or bytes, to be put elsewhere.
fn texts<'a>(fields: &'a [Field], found: &mut Vec<&'a [u8]>) {
    for field in fields {
        match &field.payload {
            Payload::Bytes(bytes) if bytes.len() < 256 => found.push(bytes),
            Payload::Message(inner) => texts(inner, found),
            _ => {}
        }
    }
}

fn once(random: &mut Random, root: &mut Vec<Field>, other: &[Field]) {
    let mut found = Vec::new();
    texts(root, &mut found);
    texts(if random.below(2) == 0 { other } else { &[] }, &mut found);
    let text = if found.is_empty() { vec![] } else { pick(random, &found).to_vec() };
    let mut path = Vec::new();
    let fields = descend(random, root, &mut path);
    if fields.is_empty() {
        return;
    }
    let (at, to) = (random.below(fields.len()), random.below(fields.len()));
    match random.below(10) {
        0 => drop(fields.remove(at)),
        1 => fields.insert(to, fields[at].clone()),
        2 => fields.swap(at, to),
        3 => {
            let payload = fields[to].payload.clone();
            fields[at].payload = payload;
        }
        4 | 5 => {
            let Some(field) = field_at(random, other, &path) else { return };
            match fields.iter().position(|f| f.number == field.number) {
                Some(same) if random.below(2) == 0 => fields[same] = field.clone(),
                _ => fields.insert(to, field.clone()),
            }
        }
        _ => change_payload(random, &mut fields[at].payload, text),
    }
}

/// Goes down until it stops at a message by chance, or there is none below; notes the fields on the way.
fn descend<'a>(
    random: &mut Random,
    fields: &'a mut Vec<Field>,
    path: &mut Vec<u64>,
) -> &'a mut Vec<Field> {
    let inner: Vec<usize> = (0..fields.len())
        .filter(|i| matches!(&fields[*i].payload, Payload::Message(m) if !m.is_empty()))
        .collect();
    if inner.is_empty() || random.below(4) == 0 {
        return fields;
    }
    let chosen = *pick(random, &inner);
    path.push(fields[chosen].number);
    match &mut fields[chosen].payload {
        Payload::Message(next) => descend(random, next, path),
        _ => unreachable!("invariant: only messages are chosen"),
    }
}

/// A field of the message that such a path leads to.
fn field_at<'a>(random: &mut Random, fields: &'a [Field], path: &[u64]) -> Option<&'a Field> {
    let Some((number, rest)) = path.split_first() else {
        return (!fields.is_empty()).then(|| pick(random, fields));
    };
    let inner: Vec<&[Field]> = fields
        .iter()
        .filter_map(|f| match &f.payload {
            Payload::Message(inner) if f.number == *number => Some(&inner[..]),
            _ => None,
        })
        .collect();
    let chosen = inner.get(random.below(inner.len()))?;
    field_at(random, chosen, rest)
}

fn change_payload(random: &mut Random, payload: &mut Payload, text: Vec<u8>) {
    match payload {
        Payload::Varint(value) => *value = number(random, *value as i64) as u64,
        Payload::Fixed(fixed) => {
            let noise = [0.0, -1.0, 1e30, f32::NAN, f32::INFINITY][random.below(5)].to_le_bytes();
            let n = fixed.len().min(4);
            fixed[..n].copy_from_slice(&noise[..n]);
        }
        Payload::Bytes(bytes) if random.below(3) > 0 => *bytes = text,
        Payload::Bytes(bytes) => bytes::change(random, bytes, &text),
        Payload::Message(inner) => inner.clear(),
    }
}
