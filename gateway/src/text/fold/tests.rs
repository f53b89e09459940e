//! Chunk-invariance, and the faults of the TXT class that need no HTTP.

use proptest::prelude::*;
use starling_actors::engine::SampledToken;

use super::*;
use crate::fixtures::{self, byte, frame, token};

fn rules(stops: &[&str]) -> Arc<TextRules> {
    Arc::new(TextRules {
        decoding: fixtures::decoding(),
        stops: stops.iter().map(|stop| (*stop).to_owned()).collect(),
        tokens_min: 0,
        skip_special: true,
        logprobs: true,
    })
}

fn fold(rules: &Arc<TextRules>, choices: u32, frames: &[GenerateFrame]) -> (Transcript, u64) {
    let mut answers = Answers::new(rules, choices);
    let mut transcript = Transcript::new(choices as usize);
    for frame in frames {
        let mut piece = Piece::default();
        answers.absorb(frame, &mut piece).expect("good frames");
        transcript.absorb(frame.choice as usize, &mut piece);
    }
    assert!(answers.done());
    (transcript, answers.completion_tokens())
}

fn tokens(text: &str) -> Vec<SampledToken> {
    text.bytes().map(|b| token(byte(b))).collect()
}

#[test]
fn txt_07_a_one_token_answer_keeps_its_token() {
    let frames = [frame(0, &[byte(b'a')], Some(FinishReason::Length))];
    let (transcript, count) = fold(&rules(&[]), 1, &frames);
    assert_eq!((transcript.answers[0].text.as_str(), count), ("a", 1));
    assert_eq!(transcript.answers[0].finish, Some(Finish::Length));
    let half = [frame(0, &[byte(0xEC)], Some(FinishReason::Length))];
    assert_eq!(fold(&rules(&[]), 1, &half).0.answers[0].text, "\u{FFFD}");
}

#[test]
fn txt_04_the_token_that_ended_the_answer_is_counted_and_not_shown() {
    let frames = [frame(0, &[byte(b'a'), byte(b'b')], Some(FinishReason::Stop))];
    let (transcript, count) = fold(&rules(&[]), 1, &frames);
    assert_eq!((transcript.answers[0].text.as_str(), count), ("a", 2));
    assert_eq!(transcript.answers[0].entries.len(), 1);
}

#[test]
fn txt_08_interleaved_choices_equal_their_own_runs() {
    let texts = ["삼E안", "aEND"];
    let alone: Vec<_> = texts
        .iter()
        .map(|text| {
            let whole = GenerateFrame { tokens: tokens(text), ..frame(0, &[], Some(FinishReason::Length)) };
            fold(&rules(&["END"]), 1, &[whole]).0.answers.remove(0)
        })
        .collect();
    let mut frames = Vec::new();
    for at in 0..texts[0].len().max(texts[1].len()) {
        for (choice, text) in texts.iter().enumerate() {
            if let Some(b) = text.as_bytes().get(at) {
                frames.push(frame(choice as u32, &[byte(*b)], None));
            }
        }
    }
    frames.extend((0..2).map(|choice| frame(choice, &[], Some(FinishReason::Length))));
    assert_eq!(fold(&rules(&["END"]), 2, &frames).0.answers, alone);
}

#[test]
fn txt_13_completion_tokens_are_the_sum_over_choices() {
    let frames = [
        frame(0, &[byte(b'a'); 3], Some(FinishReason::Length)),
        frame(1, &[byte(b'b'); 5], Some(FinishReason::Length)),
    ];
    assert_eq!(fold(&rules(&[]), 2, &frames).1, 8);
}

#[test]
fn txt_12_one_entry_per_token_in_order_through_held_back_text() {
    let text = "aE삼";
    let ids: Vec<_> = text.bytes().map(byte).collect();
    let mut frames: Vec<_> = ids.iter().map(|id| frame(0, &[*id], None)).collect();
    frames.push(frame(0, &[], Some(FinishReason::Length)));
    let (transcript, _) = fold(&rules(&["END"]), 1, &frames);
    let answer = &transcript.answers[0];
    assert_eq!(answer.text, text);
    assert_eq!(answer.entries.iter().map(|entry| entry.token.id).collect::<Vec<_>>(), ids);
    assert_eq!(answer.entries.iter().map(|entry| entry.char_offset).collect::<Vec<_>>(), [0, 1, 2, 2, 2]);
    // With a stop, the tokens behind the cut have no entry.
    let cut = [frame(0, &"abEND".bytes().map(byte).collect::<Vec<_>>(), Some(FinishReason::Length))];
    assert_eq!(fold(&rules(&["END"]), 1, &cut).0.answers[0].entries.len(), 2);
}

#[test]
fn err_05_an_error_finish_is_a_fault_and_never_an_answer() {
    let mut answers = Answers::new(&rules(&[]), 1);
    let mut piece = Piece::default();
    let bad = frame(0, &[], Some(FinishReason::Error));
    assert_eq!(answers.absorb(&bad, &mut piece), Err(FrameFault::EngineFailed));
    assert_eq!(answers.absorb(&frame(3, &[], None), &mut piece), Err(FrameFault::UnknownChoice(3)));
    assert!(piece.is_empty());
}

proptest! {
    #[test]
    fn any_cut_into_frames_gives_the_same_reply(
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(b'a'), Just(b'b'), Just(0xEC), Just(0x82)], 1..40),
        stops in prop::collection::vec("[ab]{1,3}", 0..3),
        cuts in prop::collection::vec(0usize..40, 0..10),
        tokens_min in 0u32..6,
        stopped in any::<bool>(),
    ) {
        let rules = Arc::new(TextRules {
            decoding: fixtures::decoding(),
            stops: stops.into(),
            tokens_min,
            skip_special: true,
            logprobs: true,
        });
        let ids: Vec<_> = bytes.iter().map(|b| byte(*b)).collect();
        let finish = if stopped { FinishReason::Stop } else { FinishReason::Length };
        let whole = fold(&rules, 1, &[frame(0, &ids, Some(finish))]);
        // The token that ends an answer travels with its finish, so the last frame is never empty.
        let mut places: Vec<usize> = cuts.into_iter().filter(|at| *at < ids.len()).collect();
        places.extend([0, ids.len()]);
        places.sort_unstable();
        let mut frames: Vec<_> = places.windows(2).map(|pair| frame(0, &ids[pair[0]..pair[1]], None)).collect();
        frames.last_mut().expect("one frame").finish = Some(finish);
        prop_assert_eq!(fold(&rules, 1, &frames), whole);
    }
}
