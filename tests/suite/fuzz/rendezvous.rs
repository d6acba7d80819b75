//! Processes of a job that receive arbitrary messages, before and after authentication.

use super::targets::Verdict;
use frit_comm::launch::Launch;
use frit_comm::rendezvous::Rendezvous;
use frit_comm::secret::{Secret, SecretSource};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const SECRET: &[u8] = b"the secret of mutants";
const HASH: &str = "abc";
/// How long processes wait that should meet.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a process waits for another that will not come.
const IMPATIENCE: Duration = Duration::from_millis(200);

/// Bytes whose sum is divisible by 4 are said by a stranger to rank 0, which then meets rank 1 all the same; the others by
/// rank 1 to rank 0, or by rank 0 to rank 1.
pub(super) fn hear(bytes: &[u8]) -> Verdict {
    match bytes.iter().map(|b| usize::from(*b)).sum::<usize>() % 4 {
        0 => with_a_stranger(bytes),
        1 => rank_1_hears(bytes),
        _ => rank_0_hears(bytes),
    }
}

fn launch(rank: usize, port: u16) -> Launch {
    let master = Some(("127.0.0.1".into(), port));
    Launch { rank, world_size: 2, local_rank: None, local_size: None, master, by_mpirun: false }
}

fn meet(rank: usize, port: u16, patience: Duration) -> Result<Rendezvous, String> {
    let source = SecretSource::Known(Secret::from_bytes(SECRET));
    Rendezvous::meet_with(&launch(rank, port), &source, HASH, patience).map_err(|e| e.to_string())
}

/// What a process says and hears after it has met another.
fn go_on(meeting: &Rendezvous) -> Result<(), String> {
    let talk = || {
        meeting.share(HASH.into())?;
        meeting.watch()?;
        meeting.largest(7)?;
        meeting.finish()
    };
    talk().map_err(|e| e.to_string())
}

/// A port that nothing listened at a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Connects as soon as somebody listens.
fn connect(port: u16, patience: Duration) -> io::Result<TcpStream> {
    let end = Instant::now() + patience;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_micros(200)),
            done => return done,
        }
    }
}

/// The proof that `side` knows the secret.
fn proof(side: &[u8], listens: &[u8], connects: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).expect("any length");
    [side, listens, connects].iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().to_vec()
}

fn with_a_stranger(bytes: &[u8]) -> Verdict {
    let port = free_port();
    let outcomes = std::thread::scope(|scope| {
        let zero = scope.spawn(move || meet(0, port, PATIENCE).and_then(|m| go_on(&m)));
        let mut stranger = connect(port, PATIENCE).expect("rank 0 listens");
        // It may be hung up on.
        let _ = stranger.write_all(bytes).and_then(|()| stranger.shutdown(Shutdown::Write));
        let one = scope.spawn(move || meet(1, port, PATIENCE).and_then(|m| go_on(&m)));
        [zero.join().expect("no panic"), one.join().expect("no panic")]
    });
    match outcomes.into_iter().find_map(Result::err) {
        None => Verdict::Accepted,
        Some(error) => Verdict::Internal(format!("a stranger disturbs the job: {error}")),
    }
}

fn rank_0_hears(bytes: &[u8]) -> Verdict {
    let port = free_port();
    let (met, went_on) = std::thread::scope(|scope| {
        let zero = scope.spawn(move || {
            let meeting = meet(0, port, IMPATIENCE);
            (meeting.is_ok(), meeting.and_then(|m| go_on(&m)))
        });
        let say = || -> io::Result<()> {
            let (mut challenge, own) = ([0; 32], [7; 32]);
            let mut stream = connect(port, IMPATIENCE)?;
            stream.read_exact(&mut challenge)?;
            stream.write_all(&own)?;
            stream.write_all(&proof(b"frit connects", &challenge, &own))?;
            stream.write_all(bytes)?;
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_end(&mut Vec::new()).map(drop)
        };
        // It may be hung up on, or come too late.
        let _ = say();
        zero.join().expect("no panic")
    });
    verdict(met, went_on)
}

fn rank_1_hears(bytes: &[u8]) -> Verdict {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (met, went_on) = std::thread::scope(|scope| {
        let one = scope.spawn(move || {
            let meeting = meet(1, port, IMPATIENCE);
            (meeting.is_ok(), meeting.and_then(|m| go_on(&m)))
        });
        let (mut stream, _) = listener.accept().expect("rank 1 comes");
        let say = |stream: &mut TcpStream| -> io::Result<()> {
            let (mut answer, own) = ([0; 64], [7; 32]);
            stream.write_all(&own)?;
            stream.read_exact(&mut answer)?;
            stream.write_all(&proof(b"frit listens", &own, &answer[..32]))?;
            stream.write_all(bytes)?;
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_end(&mut Vec::new()).map(drop)
        };
        // It may be hung up on.
        let _ = say(&mut stream);
        drop(listener);
        one.join().expect("no panic")
    });
    verdict(met, went_on)
}

fn verdict(met: bool, went_on: Result<(), String>) -> Verdict {
    match went_on {
        Ok(()) => Verdict::Accepted,
        Err(why) => Verdict::Refused { deep: met, why },
    }
}
