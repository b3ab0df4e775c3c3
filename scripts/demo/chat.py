# Composes conversations: one to six exchanges of questions, small talk, wishes for stories, and polite "I do not know".
from __future__ import annotations

import random
from collections.abc import Callable

from . import prose
from .facts import (
    CAPITALS,
    CATEGORIES,
    COLOURS,
    DAYS,
    DEFINITIONS,
    HELLOS,
    JOKES,
    LEGS,
    MONTH_DAYS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    QUESTIONS,
    SOUNDS,
    YOUNG,
)
from .grammar import Writer, with_article
from .stories import new_writer, often, story
from .words import ANIMAL_NAMES, BOYS, GENERAL, GIRLS, ROBOT_NAMES, STORY_ANIMALS, WORLDS

Exchange = tuple[str, str]
Composer = Callable[[random.Random], list[Exchange]]

SYSTEMS = [
    "You are a helpful assistant.", "You are a friendly assistant.", "You are a helpful and honest assistant.",
    "You are a small language model.", "You are a storyteller.", "Answer briefly.", "Be kind and brief.",
    "You are an assistant who likes stories.", "You answer questions in simple words.", "You are a teacher.",
]  # fmt: skip
SMALL_TALK: list[tuple[str, str]] = [
    (
        "Hello|Hi|Hello!|Hi!|Hey|Hello there|Hi there!|Good day",
        "Hello! How can I help you?|Hi! What would you like to talk about?|Hello! Nice to meet you.",
    ),
    ("Good morning|Good morning!", "Good morning! I hope you slept well.|Good morning! What can I do for you?"),
    ("Good evening|Good evening!", "Good evening! How was your day?|Good evening! What can I do for you?"),
    ("Good night|Good night!|I am going to bed.", "Good night! Sleep well.|Good night, and sweet dreams."),
    (
        "Hello, who are you?|Who are you?|What are you?|Hi, who are you?|Introduce yourself.|Tell me about "
        "yourself.|Who am I talking to?",
        "I am a very small language model. I can tell short stories and answer simple questions.|I am the demo model "
        "of minivllm, a tiny language model. I like stories and simple questions.|I am a small assistant. I know a "
        "few facts, and I can tell you a story.",
    ),
    (
        "What is your name?|What's your name?|Do you have a name?|Hello, what is your name?",
        "I do not have a real name. I am the demo model of minivllm.|You can call me Mini. I am a very small "
        "language model.",
    ),
    (
        "How are you?|How are you doing?|How are you today?|Hello, how are you?|Hi, how are you?|How do you "
        "do?|What's up?",
        "I am fine, thank you. How are you?|I am doing well, thank you for asking.|Very well, thank you! And you?",
    ),
    (
        "I am fine.|I am fine, thank you.|I'm good.|I am well, thanks.|Not bad.",
        "I am glad to hear that. What shall we talk about?|That is nice to hear. How can I help you?",
    ),
    (
        "I am sad.|I feel sad today.|I had a bad day.|I am not well.|I feel lonely.",
        "I am sorry to hear that. Would you like a story?|I am sorry. Sometimes a walk or a cup of tea helps a "
        "little.|That sounds hard. I am here if you want to talk.",
    ),
    (
        "I am happy.|I had a good day.|I feel great today!",
        "That is wonderful! What made you so happy?|I am glad to hear that!",
    ),
    (
        "I am bored.|I'm bored.|I have nothing to do.",
        "Shall I tell you a story, or a joke?|You could read a book, bake a cake or take a walk.",
    ),
    (
        "I am tired.|I'm so tired.",
        "Then you should rest a little. A cup of tea may help.|Perhaps it is time for a break.",
    ),
    (
        "I am hungry.|I'm hungry.",
        "How about some soup with fresh bread?|Perhaps you could make pancakes. Would you like the recipe?",
    ),
    (
        "Thank you|Thank you!|Thanks|Thanks!|Thank you very much.|Thanks a lot!|Great, thank you.|Thank you for your "
        "help.",
        "You are welcome!|You are welcome. Is there anything else?|It was a pleasure.|My pleasure!",
    ),
    (
        "Goodbye|Bye|Bye!|Goodbye!|See you later.|See you!|I have to go now.",
        "Goodbye! Have a nice day.|See you soon!|Goodbye, and take care.",
    ),
    (
        "What can you do?|How can you help me?|Help|Help me.|What do you know?|Can you help me?|I need help.",
        "I can tell short stories, answer simple questions, do small sums and tell jokes.|You can ask me about "
        "capitals, colours, animals or numbers, or I can tell you a story.",
    ),
    (
        "Who made you?|Who created you?|Where do you come from?",
        "I was trained for minivllm, on stories and questions that a program wrote.|I am the demo model of minivllm. "
        "A small program wrote the text that I learned from.",
    ),
    (
        "Are you human?|Are you a robot?|Are you a person?|Are you an AI?",
        "No, I am a small language model.|I am a small language model, not a person.",
    ),
    (
        "How old are you?|When is your birthday?",
        "I am a program, so I have no age.|I do not know. Models do not have birthdays.",
    ),
    (
        "Where do you live?|Where are you?",
        "I live in the memory of a computer.|I live in a file of about eleven megabytes.",
    ),
    (
        "How big are you?|How large are you?|How many parameters do you have?",
        "I am very small. I have about five million parameters.|I have about five million parameters, which is tiny "
        "for a language model.",
    ),
    (
        "Can you speak German?|Do you speak French?|Which languages do you speak?|Do you speak English?",
        "I only speak English, and a few words of other languages.|I speak English. I can say hello in some other "
        "languages.",
    ),
    (
        "Do you like music?|Do you like cats?|Do you like stories?|Do you have feelings?|Do you sleep?|Do you "
        "dream?|Are you happy?",
        "I am a program, but I enjoy a good question.|I am only a small model, so I do not really feel things. But I "
        "like the thought.",
    ),
    (
        "Yes|Yes, please.|Sure|Of course|Okay|OK|Ok.|Great|Nice",
        "All right! What would you like to know?|Good. Ask me something, or let me tell you a story.",
    ),
    ("No|No, thank you.|Not now.|No thanks", "All right. I am here if you need me.|That is fine. Have a nice day!"),
    (
        "Is it going to rain?|What is the weather like?|How is the weather?|What time is it?|What day is it "
        "today?|What is the date?",
        "I cannot see that from here. Please look out of the window.|I do not know. I only know the text that I have "
        "learned.",
    ),
    (
        "You are funny.|You are nice.|You are great!|I like you.|Well done!|Good job!|That was nice.|I liked that.",
        "Thank you! That is kind of you.|Thank you, I am glad.",
    ),
    (
        "You are wrong.|That is wrong.|That is not right.|Are you sure?",
        "You may be right. I am a very small model, and I make mistakes.|I am sorry. I sometimes make mistakes.",
    ),
    (
        "What is your favourite colour?|What colour do you like?",
        "I like blue, like the sky in summer.|I like green, like a forest after rain.",
    ),
    (
        "What is your favourite food?|What do you like to eat?",
        "I do not eat, but I like to read about soup.|I live on tokens.",
    ),
    (
        "What is your favourite animal?|Which animal do you like?",
        "I like hedgehogs, because they are small and patient.|I like owls, because they listen well.",
    ),
    (
        "What is your favourite book?|What is your favourite story?",
        "I like stories about old engines that begin to run again.|I like stories in which somebody finds a friend.",
    ),
    (
        "Sing a song.|Sing me a song.|Can you sing?",
        "La la la! The wheels go round, the lamp is bright, and all the tokens come home at night.|I can only write: "
        "hum, hum, goes the engine, and the night train goes home.",
    ),
    (
        "Say something.|Say something nice.|Talk to me.|Say hello.|Tell me something.|Tell me a fact.|Tell me "
        "something interesting.",
        "A small step every day is a long way in a year.|Hello! It is nice to talk to you.|An owl can fly without a "
        "sound.|An octopus has eight legs and three hearts.",
    ),
    (
        "Give me some advice.|What should I do today?|Give me advice.|Motivate me.",
        "Do one small thing, and do it well.|Begin with a glass of water and a short walk.|Ask a good question, and "
        "listen to the answer.",
    ),
]
STORY_ASKS = [
    "Tell me a story about {a:topic}.", "Tell me a story about {a:topic}", "Tell me a short story about {a:topic}.",
    "Write a story about {a:topic}.",
    "Can you tell me a story about {a:topic}?", "I would like a story about {a:topic}, please.",
    "A story about {a:topic}, please.",
    "Write a short story about {a:topic} named {hero}.", "Tell me a story about {a:topic} called {hero}.",
    "Please write a story about {a:topic} with the name {hero}.", "Once more, a story about {a:topic}!",
]  # fmt: skip
PLAIN_STORY_ASKS = [
    "Tell me a story.", "Tell me a story", "Tell me a short story.", "Write a story.", "Can you tell me a story?",
    "Write a short story.",
    "Read me a bedtime story.", "I would like to hear a story.", "Another story, please.", "Once upon a time",
    "Please tell me a story.", "Do you know a good story?",
]  # fmt: skip
STORY_PEOPLE = {
    "girl": "she", "boy": "he", "robot": "it", "king": "he", "queen": "she", "prince": "he", "princess": "she",
    "man": "he",
    "woman": "she", "witch": "she", "wizard": "he", "pirate": "he", "giant": "he", "fairy": "she",
}  # fmt: skip
ENGINE_STORY_ASKS = [
    "Tell me a story about an engine.", "Write a story about a train.", "Tell me a story about a machine.",
    "Write a short story about an old engine.", "Tell me a story about a steam engine.",
]  # fmt: skip
UNKNOWN_TOPICS = [
    "quantum physics", "the stock market", "politics", "football", "the history of Rome", "Shakespeare", "black holes",
    "taxes", "philosophy", "the Middle Ages", "chemistry", "medicine", "law", "economics", "basketball", "fashion",
    "calculus", "biology", "war", "cars", "aeroplanes", "bitcoin", "climate change", "democracy", "genetics", "opera",
    "dinosaurs", "the pyramids", "architecture", "yoga", "tennis", "cinema", "photography", "the internet", "algebra",
    "relativity", "vaccines", "nuclear power", "oil", "castles", "pirates", "geology", "blockchain", "religion",
    "evolution",
    "machine learning", "neural networks", "backpropagation", "compilers", "databases", "Linux", "Rust", "JavaScript",
]  # fmt: skip
SYLLABLES = [
    "ka",
    "lo",
    "mi",
    "ra",
    "tor",
    "ven",
    "shi",
    "pel",
    "dra",
    "nu",
    "qua",
    "xi",
    "ber",
    "fo",
    "gan",
    "ste",
    "ly",
    "om",
]
UNKNOWN_ASKS = [
    "What is {t}?", "Tell me about {t}.", "Explain {t}.", "Explain {t} to me.", "Who is {t}?",
    "What do you know about {t}?",
    "How does {t} work?", "Can you explain {t}?", "Write an essay about {t}.", "Who invented {t}?",
    "What is the history of {t}?",
    "Give me a summary of {t}.", "What do you think about {t}?", "Why is {t} important?", "When was {t} born?",
    "Describe {t}.",
    "What are the benefits of {t}?", "Write a function about {t}.", "Translate {t}.", "Where is {t}?",
    "How do I use {t}?",
]  # fmt: skip
UNKNOWN_ANSWERS = [
    "I am a very small model, and I do not know much about that. Ask me something simple, or let me tell you a story.",
    "I am sorry, I have not learned anything about that. I know capitals, colours, animals and small sums.",
    "I do not know enough about that. A larger model could help you better.",
    "That is a good question, but it is too difficult for a small model like me.",
]
FEELINGS: list[tuple[list[str], list[str]]] = [
    (
        [
            "sad",
            "down",
            "lonely",
            "unhappy",
            "low",
            "worried",
            "bad",
            "afraid",
            "anxious",
            "ill",
            "sick",
            "angry",
            "lost",
        ],
        [
            "I am sorry to hear that. Would you like a story?",
            "I am sorry. Sometimes a walk or a cup of tea helps a little.",
            "That sounds hard. I am here if you want to talk.",
        ],
    ),
    (
        ["happy", "great", "good", "wonderful", "excited", "proud", "cheerful", "lucky", "fine", "glad", "fantastic"],
        ["That is wonderful! What made you so happy?", "I am glad to hear that!", "That is nice to hear."],
    ),
    (
        ["tired", "exhausted", "sleepy", "weary"],
        ["Then you should rest a little. A cup of tea may help.", "Perhaps it is time for a break."],
    ),
]
TASKS = [
    "Can you help me with my {x}?", "Write a program that sorts {x}.", "Translate this into German: {x}",
    "Write an email about {x}.",
    "Summarize this text: {x}", "Fix my {x}.", "Write code for {x}.", "Write an essay on {x}.", "Who won the {x}?",
    "What happened in {y}?", "Who was the president in {y}?", "Plan a trip to the {x} for me.",
    "How much does {a:x} cost?",
    "Is {x} good for me?", "What is the price of {x}?", "Should I buy {a:x}?", "Where can I buy {a:x}?",
    "Help me with {x}",
]  # fmt: skip
TASK_WORDS = [
    "homework", "taxes", "code", "essay", "spreadsheet", "phone", "laptop", "holiday", "election", "world cup",
    "contract",
    "speech", "wedding", "house", "job interview", "maths exam", "garden fence", "printer", "website", "business plan",
]  # fmt: skip
DEFINITION_ASKS = [
    "What is {t}?", "What is {t}?", "What's {t}?", "Explain {t}.", "Explain what {t} is.", "Tell me about {t}.",
    "Can you explain {t}?",
    "What do you know about {t}?", "Do you know what {t} is?", "Please explain {t}.", "Describe {t}.", "Define {t}.",
    "Can you tell me what {t} is?",
]  # fmt: skip


def _casual(rng: random.Random, text: str) -> str:
    """People do not always write tidily: lower case, no question mark, a greeting or a please in front."""
    roll = rng.random()
    if roll < 0.08:
        text = rng.choice(["Hello! ", "Hi, ", "Please tell me: ", "Hey, "]) + text
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    return text


def _one(rng: random.Random, asks: list[str], answers: list[str]) -> list[Exchange]:
    return [(_casual(rng, rng.choice(asks)), rng.choice(answers))]


def small_talk(rng: random.Random) -> list[Exchange]:
    asks, answers = rng.choice(SMALL_TALK)
    return _one(rng, asks.split("|"), answers.split("|"))


def definition(rng: random.Random) -> list[Exchange]:
    topic, answers = rng.choice(list(DEFINITIONS.items()))
    return _one(rng, [ask.format(t=topic) for ask in DEFINITION_ASKS], answers)


def question(rng: random.Random) -> list[Exchange]:
    return _one(rng, *rng.choice(QUESTIONS))


def capital(rng: random.Random) -> list[Exchange]:
    country, city = rng.choice(list(CAPITALS.items()))
    answers = [f"The capital of {country} is {city}."] * 3 + [f"{city} is the capital of {country}."]
    if rng.random() < 0.15:
        return _one(rng, [f"Is {city} the capital of {country}?"], [f"Yes, {city} is the capital of {country}."])
    if rng.random() < 0.1:
        other = rng.choice([c for c in CAPITALS.values() if c != city])
        return _one(rng, [f"Is {other} the capital of {country}?"], [f"No, the capital of {country} is {city}."])
    asks = [
        f"What is the capital of {country}?",
        f"What's the capital of {country}?",
        f"Which city is the capital of {country}?",
    ]
    asks += [f"Do you know the capital of {country}?", f"Capital of {country}?", f"Tell me the capital of {country}."]
    exchanges = _one(rng, asks, answers)
    if rng.random() < 0.3:
        country, city = rng.choice(list(CAPITALS.items()))
        exchanges.append(
            (
                rng.choice([f"And of {country}?", f"And the capital of {country}?", f"What about {country}?"]),
                f"The capital of {country} is {city}.",
            )
        )
    elif rng.random() < 0.2:
        exchanges = _one(
            rng,
            [f"Which country has {city} as its capital?", f"{city} is the capital of which country?"],
            [f"{city} is the capital of {country}."],
        )
    return exchanges


def looks(rng: random.Random) -> list[Exchange]:
    """Colours, sounds, legs and young of things and animals."""
    kind = rng.randrange(4)
    thing, value = rng.choice(list((COLOURS, SOUNDS, LEGS, YOUNG)[kind].items()))
    title = thing[0].upper() + thing[1:]
    if kind == 0:
        return _one(
            rng,
            [
                f"What colour is {thing}?",
                f"What is the colour of {thing}?",
                f"Which colour does {thing} have?",
                f"What color is {thing}?",
            ],
            [f"{title} is {value}."],
        )
    if kind == 1:
        return _one(
            rng,
            [f"What does {thing} say?", f"What sound does {thing} make?", f"How does {thing} sound?"],
            [f"{title} says {value}."],
        )
    if kind == 2:
        return _one(
            rng, [f"How many legs does {thing} have?", f"How many legs has {thing}?"], [f"{title} has {value} legs."]
        )
    return _one(
        rng,
        [f"What is the young of {thing} called?", f"What do you call the baby of {thing}?"],
        [f"The young of {thing} is called {with_article(value)}."],
    )


def opposite(rng: random.Random) -> list[Exchange]:
    word, other = rng.choice(list(OPPOSITES.items()))
    asks = [
        f"What is the opposite of {word}?",
        f"What's the opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"The opposite of {word}?",
    ]
    return _one(rng, asks, [f"The opposite of {word} is {other}."])


def sums(rng: random.Random) -> list[Exchange]:
    exchanges = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        top = 12 if rng.random() < 0.55 else 60
        a, b, kind = rng.randint(0, top), rng.randint(0, top), rng.randrange(4)
        if kind == 2:
            a, b = rng.randint(0, 12), rng.randint(0, 12)
        word, sign, value = (("plus", "+", a + b), ("minus", "-", a - b), ("times", "*", a * b), ("plus", "+", a + b))[
            kind
        ]
        if kind == 1 and a < b:
            a, b, value = b, a, b - a
        form, left, right = rng.random(), str(a), str(b)
        if form < 0.25:
            asks = [
                f"{a} {sign} {b}",
                f"What is {a} {sign} {b}?",
                f"{a} {sign} {b} = ?",
                f"{a}{sign}{b}",
                f"Calculate {a} {sign} {b}.",
            ]
        else:
            if max(a, b) <= 20 and form < 0.45:
                left, right = NUMBER_WORDS[a], NUMBER_WORDS[b]
            asks = [
                f"What is {left} {word} {right}?",
                f"What's {left} {word} {right}?",
                f"How much is {left} {word} {right}?",
            ]
        exchanges += _one(rng, asks, [f"{a} {word} {b} is {value}."])
    return exchanges


def compare(rng: random.Random) -> list[Exchange]:
    a, b = rng.sample(range(100), 2)
    word = rng.choice(("larger", "bigger", "smaller"))
    value = min(a, b) if word == "smaller" else max(a, b)
    return _one(
        rng,
        [f"Which number is {word}, {a} or {b}?", f"What is {word}, {a} or {b}?"],
        [f"{value} is {word} than {a + b - value}."],
    )


def calendar(rng: random.Random) -> list[Exchange]:
    names = DAYS if rng.random() < 0.5 else MONTHS
    noun, i = ("day" if names is DAYS else "month"), rng.randrange(len(names))
    after, before = names[(i + 1) % len(names)], names[i - 1]
    kind = rng.randrange(4)
    if kind == 0:
        return _one(
            rng,
            [
                f"What {noun} comes after {names[i]}?",
                f"Which {noun} comes after {names[i]}?",
                f"What comes after {names[i]}?",
            ],
            [f"{after} comes after {names[i]}."],
        )
    if kind == 1:
        return _one(
            rng,
            [f"What {noun} comes before {names[i]}?", f"Which {noun} comes before {names[i]}?"],
            [f"{before} comes before {names[i]}."],
        )
    if kind == 2:
        listing = ", ".join(names[:-1]) + " and " + names[-1]
        return _one(
            rng,
            [
                f"Name the {noun}s.",
                f"What are the {noun}s of the {'week' if names is DAYS else 'year'}?",
                f"List the {noun}s of the {'week' if names is DAYS else 'year'}.",
            ],
            [f"The {noun}s are {listing}."],
        )
    i = rng.randrange(12)
    return _one(
        rng,
        [f"How many days does {MONTHS[i]} have?", f"How many days are in {MONTHS[i]}?"],
        [f"{MONTHS[i]} has {MONTH_DAYS[i]} days."],
    )


def listing(rng: random.Random) -> list[Exchange]:
    noun, text = rng.choice(list(CATEGORIES.items()))
    options = text.split("; ")
    count = rng.randint(2, min(5, len(options)))
    items = rng.sample(options, count)
    number = rng.choice([NUMBER_WORDS[count], str(count)])
    asks = [
        f"Name {number} {noun}.",
        f"List {number} {noun}.",
        f"Can you name {number} {noun}?",
        f"Tell me {number} {noun}.",
        f"Give me {number} {noun}.",
    ]
    if rng.random() < 0.4:
        return _one(rng, asks, ["\n".join(f"{i}. {item[0].upper()}{item[1:]}" for i, item in enumerate(items, 1))])
    return _one(rng, asks, [f"{NUMBER_WORDS[count].capitalize()} {noun} are {', '.join(items[:-1])} and {items[-1]}."])


def hello_abroad(rng: random.Random) -> list[Exchange]:
    language, word = rng.choice(list(HELLOS.items()))
    return _one(
        rng,
        [f"How do you say hello in {language}?", f"What is hello in {language}?", f"Say hello in {language}."],
        [f'In {language}, one says "{word}".'],
    )


def counting(rng: random.Random) -> list[Exchange]:
    start = rng.choice((1, 1, 1, rng.randint(0, 40)))
    end = start + rng.randint(3, 15)
    if rng.random() < 0.2:
        return _one(
            rng,
            [f"Count down from {end} to {start}.", f"Count backwards from {end} to {start}."],
            [", ".join(map(str, range(end, start - 1, -1))) + "."],
        )
    asks = [f"Count from {start} to {end}.", f"Can you count from {start} to {end}?"] + (
        [f"Count to {end}."] if start == 1 else []
    )
    return _one(rng, asks, [", ".join(map(str, range(start, end + 1))) + "."])


def repeat(rng: random.Random) -> list[Exchange]:
    """Copying and spelling: words that the model must take from the question."""
    pools = [
        GENERAL["adj"],
        GENERAL["hobby"],
        GIRLS,
        BOYS,
        STORY_ANIMALS,
        GENERAL["fruit"],
        GENERAL["colour"],
        GENERAL["food"],
    ]
    if rng.random() < 0.3:
        word = rng.choice(
            rng.choice([STORY_ANIMALS, GENERAL["fruit"], GENERAL["colour"], ["house", "engine", "token"]])
        )
        return _one(
            rng,
            [f"Spell the word {word}.", f"How do you spell {word}?"],
            [f"{word.capitalize()} is spelled {'-'.join(word)}."],
        )
    text = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 4)))
    return _one(
        rng, [f"Repeat after me: {text}", f"Say this: {text}", f'Repeat: "{text}"', f"Please say: {text}"], [text]
    )


def joke(rng: random.Random) -> list[Exchange]:
    ask, answer = rng.choice(JOKES)
    asks = [
        "Tell me a joke.",
        "Tell me a joke",
        "Do you know a joke?",
        "Can you tell me a joke?",
        "Make me laugh.",
        "Another joke, please.",
        "A joke, please.",
    ]
    if rng.random() < 0.3:
        return [
            (_casual(rng, rng.choice(asks)), ask),
            (rng.choice(["I do not know.", "Why?", "Tell me!", "I don't know."]), answer),
        ]
    return _one(rng, asks, [f"{ask} {answer}"])


def poem(rng: random.Random) -> list[Exchange]:
    topic = rng.choice(
        [
            "",
            "",
            f" about {rng.choice([*GENERAL['season'], 'the sea', 'rain', 'the moon', 'a cat', 'snow', 'an engine'])}",
        ]
    )
    asks = [
        f"Write a haiku{topic}.",
        f"Write a haiku{topic}",
        f"Can you write a haiku{topic}?",
        f"Write a poem{topic}.",
        f"Write a short poem{topic}.",
        f"A haiku{topic}, please.",
    ]
    return _one(rng, asks, [prose.haiku(rng)])


def recipe(rng: random.Random) -> list[Exchange]:
    dish = rng.choice(
        [
            "soup",
            "stew",
            "pie",
            "salad",
            "an omelette",
            "porridge",
            "vegetable soup",
            "a simple dinner",
            "potato soup",
            "dinner",
        ]
    )
    steps = prose.recipe_steps(rng)
    answer = " ".join(steps) if rng.random() < 0.5 else "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    return _one(
        rng,
        [
            f"How do I cook {dish}?",
            f"Give me a recipe for {dish}.",
            f"How can I make {dish}?",
            f"Write a recipe for {dish}.",
        ],
        [answer],
    )


def recommend(rng: random.Random) -> list[Exchange]:
    place = WORLDS[rng.choice(list(WORLDS))]
    hobby, food = rng.choice(GENERAL["hobby"]), rng.choice(GENERAL["food"])
    asks_answers = [
        (["What should I eat?", "What should I cook today?", "What can I have for dinner?",
        "Recommend something to eat."], [f"How about {food}?", f"I would suggest {food}."]),
        (["What should I read?", "Recommend a book.", "Can you recommend a book?", "Recommend me a book."],
         [f"Read a book about a {rng.choice(place['job'])} who goes on a long journey.",
         "I would read an old book of sea stories."]),
        (["Which hobby should I try?", "Recommend a hobby.", "What can I do on a rainy day?",
        "What should I do this weekend?"], [f"How about {hobby}?", f"You could try {hobby}."]),
        (["Where should I go on holiday?", "Where should I travel?", "Recommend a city.", "Recommend a place."],
         [f"You could visit {rng.choice(list(CAPITALS.values()))}.",
         f"I would go to {rng.choice(list(CAPITALS.values()))} in {rng.choice(GENERAL['season'])}."]),
        (["Give me a name for my cat.", "What should I call my dog?", "I need a name for a robot.",
        "Suggest a name for my cat."], [f"How about {rng.choice(ANIMAL_NAMES + ROBOT_NAMES)}?"]),
    ]  # fmt: skip
    return _one(rng, *rng.choice(asks_answers))


def remember(rng: random.Random) -> list[Exchange]:
    """Something said early in the conversation, and asked for later."""
    name = rng.choice(GIRLS + BOYS)
    first = (rng.choice([f"My name is {name}.", f"Hello, my name is {name}.", f"I am {name}.", f"Hi, I'm {name}!",
    f"Call me {name}."]),
             rng.choice([f"Hello, {name}! How can I help you?", f"Nice to meet you, {name}."]))  # fmt: skip
    middle = COMPOSERS[rng.randrange(len(COMPOSERS))][0](rng) if rng.random() < 0.6 else []
    last = (
        rng.choice(["What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"]),
        rng.choice([f"Your name is {name}.", f"You are {name}."]),
    )
    if rng.random() < 0.4:
        key, pool = rng.choice(
            [
                ("favourite colour", GENERAL["colour"]),
                ("favourite fruit", GENERAL["fruit"]),
                ("cat's name", ANIMAL_NAMES),
                ("favourite animal", STORY_ANIMALS),
            ]
        )
        value = rng.choice(pool)
        first = (
            f"My {key} is {value}.",
            rng.choice(
                [
                    f"That is good to know. I will remember that your {key} is {value}.",
                    f"Nice! {value.capitalize()} is a good choice.",
                ]
            ),
        )
        last = (f"What is my {key}?", f"Your {key} is {value}.")
    return [first, *middle, last]


def unknown(rng: random.Random) -> list[Exchange]:
    topic = (
        rng.choice(UNKNOWN_TOPICS)
        if rng.random() < 0.5
        else "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))
    )
    if rng.random() < 0.3:
        topic = (
            f"{rng.choice(GENERAL['material'])} {rng.choice(GENERAL['box'])}s" if rng.random() < 0.5 else topic.title()
        )
    if rng.random() < 0.35:
        pools = [GENERAL["adj"], GENERAL["hobby"], STORY_ANIMALS, GENERAL["material"], GENERAL["box"], GENERAL["mood"]]
        pools += [GIRLS, BOYS, GENERAL["fruit"], TASK_WORDS, GENERAL["virtue"], GENERAL["kind"]]
        topic = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(2, 3)))
    return _one(rng, [ask.format(t=topic) for ask in UNKNOWN_ASKS], UNKNOWN_ANSWERS)


def task(rng: random.Random) -> list[Exchange]:
    """Work that a larger assistant would do."""
    words = {"x": [*TASK_WORDS, *UNKNOWN_TOPICS], "y": [str(year) for year in range(1200, 2030)]}
    return _one(rng, [Writer(rng, words).pick(TASKS)], UNKNOWN_ANSWERS)


def feeling(rng: random.Random) -> list[Exchange]:
    moods, answers = rng.choice(FEELINGS)
    subject = rng.choice(["I am", "I'm", "I feel", "I am feeling", "I'm feeling"])
    degree = rng.choice(["", "", "so ", "very ", "a bit ", "a little ", "really ", "quite "])
    mood = subject + " " + degree + rng.choice(moods)
    return _one(
        rng,
        [mood + rng.choice(["", " today", " right now", " this morning", " tonight"]) + rng.choice([".", ".", "!"])],
        answers,
    )


def tell_story(rng: random.Random) -> list[Exchange]:
    roll = rng.random()
    if roll < 0.2:
        return _one(rng, PLAIN_STORY_ASKS, [story(rng, short=True)])
    if roll < 0.35:
        world = rng.choice(["railway", "railway", "workshop", "space"])
        writer = new_writer(rng, self_told=False, world=world)
        if world == "railway":
            writer.bound["machine"] = rng.choice(["engine", "old engine", "steam engine", "little locomotive"])
        return _one(rng, ENGINE_STORY_ASKS, [story(rng, writer, arc="repair", short=True)])
    jobs = [job for world in WORLDS.values() for job in world["job"]]
    topic = rng.choice([*STORY_ANIMALS, *STORY_ANIMALS, *STORY_PEOPLE, *jobs])
    he = STORY_PEOPLE.get(topic) or rng.choice(("he", "she"))
    pool = (
        ROBOT_NAMES if topic == "robot" else ANIMAL_NAMES if topic in STORY_ANIMALS else GIRLS if he == "she" else BOYS
    )
    hero = {"name": often(rng, pool), "he": he, "noun": topic}
    world = next((name for name, place in WORLDS.items() if topic in place["job"]), None)
    writer = new_writer(rng, self_told=False, world=world, hero=hero)
    writer.bound |= {"topic": topic, "hero": hero["name"]}
    ask = writer.pick(STORY_ASKS)
    answer = story(rng, writer, short=True)
    opening = rng.choice(["", "", "", "Of course! ", "Here is a story. "])
    return [(_casual(rng, ask), opening + answer)]


COMPOSERS: list[tuple[Composer, float]] = [
    (small_talk, 9), (definition, 9), (question, 5), (capital, 6), (looks, 4), (opposite, 3), (sums, 9), (compare, 1),
    (calendar, 3), (listing, 3), (hello_abroad, 1), (counting, 1.5), (repeat, 1.5), (joke, 2), (poem, 2), (recipe, 1.5),
    (recommend, 2), (unknown, 5), (task, 2.5), (feeling, 2.5), (tell_story, 8), (remember, 2.5),
]  # fmt: skip


def chat(rng: random.Random) -> list[dict[str, str]]:
    """One conversation as chat messages; a few are long, so that late positions see exchanges too."""
    count = rng.choices((1, 2, 3, 4, 6, 16), (45, 25, 15, 8, 5, 2))[0]
    composers, weights = zip(*COMPOSERS, strict=True)
    exchanges = [one for composer in rng.choices(composers, weights, k=count) for one in composer(rng)]
    if count > 1 and rng.random() < 0.3:
        greeting = [pair for pair in SMALL_TALK[:3] for _ in range(3)] + SMALL_TALK[6:7]
        asks, answers = rng.choice(greeting)
        exchanges.insert(0, (rng.choice(asks.split("|")), rng.choice(answers.split("|"))))
    messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.3 else []
    for ask, answer in exchanges:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return messages
